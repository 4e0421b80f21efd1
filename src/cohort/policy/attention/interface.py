"""Attention over the segments of a packed row, behind the interface of transformers.

The segments travel with each call of the model, as a keyword argument that its layers hand on. A variable that is set
around the call would not do: gradient checkpointing runs the layers again in backward.

S tokens of the row, P of the prefix; heads and dim are those of one attention.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cohort.policy.attention.cascade import KeyValue, cascade
from cohort.policy.attention.decoding import Wave, attention_of_decoding
from cohort.policy.attention.flex import flex
from cohort.policy.attention.varlen import varlen
from cohort.policy.trial import numbers, works
from cohort.segments import ROOT, Segments, lay_out
from cohort.staging import to_device

NAME = "cohort"
Backend = Literal["cascade", "varlen", "flex"]
_BACKENDS: Mapping[Backend, Callable[..., Tensor]] = {"cascade": cascade, "varlen": varlen, "flex": flex}
# What layers hand to an attention function and what changes nothing in training without a cache.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "layer_idx"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
)
_chosen: list[Backend] = []  # by `backend`, the innermost last


class KeyValues(UserDict[int, KeyValue]):
    """Keys and values of a prompt, by number of the layer: each [1, key heads, P, dim], after rotary embedding.

    Not a `dict`, of which wrappers of models make copies on the way to the layers.
    """


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    prefix: KeyValues | None = None,
    captured: KeyValues | None = None,
    decoding: Sequence[Wave] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: over segments where they are given, of decoding, and otherwise the library's own.

    Args:
        module: the layer's attention.
        query: [1, query heads, S, dim] with segments.
        key: [1, key heads, S, dim].
        value: [1, key heads, S, dim].
        attention_mask: not looked at with segments.
        segments: of the row.
        prefix: what the segments' branches of PREFIX go on from.
        captured: takes the layer's keys and values, unless it has them: layers may be run again in backward.
        decoding: completions in this order, of each of which the row has one new token.
        kwargs: the layer's scaling, and what else it has.

    Returns:
        [1, S, query heads, dim], and None in place of the attention's weights.

    Raises:
        ValueError: the layer wants something that attention over segments does not do.
    """
    if decoding is not None:  # what else the layer wants, the prompts' attention has looked at
        window, longest = kwargs.get("sliding_window"), max(wave.longest_path for wave in decoding)
        if window is not None and longest > window:
            raise ValueError(f"a sequence of {longest} tokens does not fit a window of {window}")
        return attention_of_decoding(module.layer_idx, query, key, value, decoding, kwargs.get("scaling")), None
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if captured is not None:
        captured.setdefault(module.layer_idx, (key, value))
    return packed_attention(
        module, query, key, value, segments, None if prefix is None else prefix[module.layer_idx], **kwargs
    ), None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    prefix: KeyValue | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of a layer over segments, [1, S, query heads, dim]."""
    unknown = sorted(name for name, x in kwargs.items() if x is not None and name not in _WITHOUT_EFFECT)
    if unknown:  # softcaps, sinks, biases
        raise ValueError(f"attention over segments does not know {', '.join(unknown)}")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("attention over segments is causal and without dropout")
    if sliding_window is not None and segments.longest_path > sliding_window:
        raise ValueError(f"a sequence of {segments.longest_path} tokens does not fit a window of {sliding_window}")
    dtype = _compute_dtype(query)
    q, k, v = (_row(x, dtype) for x in (query, key, value))
    if segments.prefix_tokens == 0:  # completions of one token have no branch, and nothing sees the prefix
        prefix = None
    before = None if prefix is None else (_row(prefix[0], dtype), _row(prefix[1], dtype))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _BACKENDS[choose_backend(q, v)](q, k, v, segments, prefix=before, scale=scale).unsqueeze(0)


def choose_backend(query: Tensor, value: Tensor) -> Backend:
    """What computes attention over segments, by device, dtype and head sizes."""
    if _chosen:
        return _chosen[-1]
    if query.device.type != "cuda":
        return "cascade"
    size = query.shape[-1]
    if (
        query.dtype in (torch.float16, torch.bfloat16)
        and size == value.shape[-1] <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    ):
        return "varlen"
    # the compiled kernels have no float64, and want tiles of 16
    if query.dtype == torch.float64 or min(size, value.shape[-1]) < 16:
        return "cascade"
    return "flex" if _flex_works(query.device, query.dtype, *query.shape[1:], *value.shape[1:]) else "cascade"


@cache
def _flex_works(
    device: torch.device, dtype: torch.dtype, query_heads: int, dim: int, key_heads: int, value_dim: int
) -> bool:
    """Whether attention of these heads can be compiled here, tried on a small row, forward and backward."""
    segments = to_device(lay_out((3, 2, 4), (ROOT, 0, 0)), device)
    tokens = segments.num_tokens

    def compare() -> Iterator[tuple[Tensor, Tensor]]:
        shapes = (query_heads, dim), (key_heads, dim), (key_heads, value_dim)
        q, k, v = (numbers(tokens, *shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
        upstream = numbers(tokens, query_heads, value_dim, device=device, dtype=dtype)
        outcomes = []
        for compute in (flex, cascade):
            out = compute(q, k, v, segments, prefix=None, scale=dim**-0.5)
            outcomes.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
        yield from zip(*outcomes, strict=True)

    # whatever is computed around it, and whoever looks after what that keeps for backward
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        return works("PyTorch's compiled kernels for attention", "matrix products are used", compare)


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Use this one inside, for comparisons."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def _row(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [1, heads, tokens, dim] as [tokens, heads, dim]."""
    return x.squeeze(0).transpose(0, 1).to(dtype)


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Layers may norm queries and keys in float32 inside autocast, which casts the library's attention, and so here."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.get_autocast_dtype(device)
    return query.dtype


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # of calls without segments; with them a made mask goes in
