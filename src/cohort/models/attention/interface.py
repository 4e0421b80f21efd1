"""Register our attention with transformers, and choose its backend.

Kernels that are compiled at run time are tried out first: an unsupported GPU or driver, or a missing C compiler, costs
speed and not the run.

The attention metadata is a keyword argument of the model that its layers pass on to attention. (A context variable
would not work: gradient checkpointing reruns layers in backward.)

S tokens of the row, P of the cached prefix.
"""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cohort.errors import describe_error
from cohort.models.attention.cascade import KeyValue, cascade
from cohort.models.attention.decoding import DecodeBatch, decode_attention
from cohort.models.attention.varlen import varlen
from cohort.packing.segments import AttentionMetadata

_TOLERANCE = 3e-2  # relative to the largest value: above rounding, far below real errors


def kernels_agree(kernels: str, instead: str, compare: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> bool:
    """Return whether kernels run and give correct results; otherwise warn.

    Args:
        kernels: name for the warning, e.g. "Triton kernels for ...".
        instead: name of the fallback.
        compare: yields pairs of actual and expected results.

    Raises:
        RuntimeError: out of memory, which says nothing about the kernels.
    """
    try:
        for actual, expected in compare():
            error = ((actual - expected).abs().max() / expected.abs().max()).item()  # waits for the device
            if not error <= _TOLERANCE:  # also true for NaN
                raise ArithmeticError(f"results differ by {error:.1g} of the largest value")
    except Exception as error:
        if "out of memory" in str(error):
            raise
        warn_fallback(kernels, instead, error)
        return False
    return True


def warn_fallback(kernels: str, instead: str, error: Exception) -> None:
    """Warn that kernels are not used, and why."""
    warnings.warn(
        f"{kernels} do not work here ({describe_error(error, 300)}). Falling back to {instead}, which is slower",
        RuntimeWarning,
        stacklevel=2,
    )


def probe_values(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return deterministic values in [-1, 1], without using the random generators."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device, dtype=torch.float32).mul_(0.7).sin_().view(shape).to(dtype)


NAME = "cohort"
Backend = Literal["cascade", "varlen"]
_BACKENDS: Mapping[Backend, Callable[..., Tensor]] = {"cascade": cascade, "varlen": varlen}
# Arguments that layers pass to attention and that have no effect without a KV cache.
_IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "cache", "layer_idx"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
)
_chosen: list[Backend] = []  # set by `backend`, innermost last


class KVCache(UserDict[int, KeyValue]):
    """Keys and values of a prefix by layer index, each [1, key heads, P, dim], after rotary embedding.

    Not a `dict`, because model wrappers copy dicts on the way to the layers.
    """


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attn_metadata: AttentionMetadata | None = None,
    prefix: KVCache | None = None,
    captured: KVCache | None = None,
    decoding: Sequence[DecodeBatch] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: packed, decoding, or transformers' own sdpa.

    Args:
        module: the attention module of the layer.
        query: [1, query heads, S, dim] if packed or decoding.
        key: [1, key heads, S, dim].
        value: [1, key heads, S, dim].
        attention_mask: ignored if packed or decoding.
        attn_metadata: metadata of a packed row.
        prefix: keys and values of the cached prefix.
        captured: filled with the keys and values of the layer, unless it has them (layers may be rerun in backward).
        decoding: batches of completions; the row has one new token of each.
        kwargs: scaling and other arguments of the layer.

    Returns:
        [1, S, query heads, dim], and None for the attention weights.

    Raises:
        ValueError: the layer uses a feature that packed attention does not support.
    """
    if decoding is not None:  # other features are checked in the prefill
        window, longest = kwargs.get("sliding_window"), max(batch.max_context_tokens for batch in decoding)
        if window is not None and longest > window:
            raise ValueError(f"a sequence of {longest} tokens exceeds the sliding window of {window}")
        return decode_attention(module.layer_idx, query, key, value, decoding, kwargs.get("scaling")), None
    if attn_metadata is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if captured is not None:
        captured.setdefault(module.layer_idx, (key, value))
    return packed_attention(
        module, query, key, value, attn_metadata, None if prefix is None else prefix[module.layer_idx], **kwargs
    ), None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    prefix: KeyValue | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of a layer over a packed row, [1, S, query heads, dim]."""
    unknown = sorted(name for name, x in kwargs.items() if x is not None and name not in _IGNORED_ARGUMENTS)
    if unknown:  # softcaps, sinks, biases
        raise ValueError(f"packed attention does not support {', '.join(unknown)}")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("packed attention must be causal and without dropout")
    if sliding_window is not None and attn_metadata.max_context_tokens > sliding_window:
        raise ValueError(
            f"a sequence of {attn_metadata.max_context_tokens} tokens exceeds the sliding window of {sliding_window}"
        )
    dtype = _compute_dtype(query)
    q, k, v = (_row(x, dtype) for x in (query, key, value))
    if attn_metadata.prefix_tokens == 0:  # all completions have one token, so nothing attends to the prefix
        prefix = None
    prefix_rows = None if prefix is None else (_row(prefix[0], dtype), _row(prefix[1], dtype))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _BACKENDS[choose_backend(q, v)](q, k, v, attn_metadata, prefix=prefix_rows, scale=scale).unsqueeze(0)


def choose_backend(query: Tensor, value: Tensor) -> Backend:
    """Choose the backend of packed attention by device, dtype and head sizes."""
    if _chosen:
        return _chosen[-1]
    size = query.shape[-1]
    has_kernel = (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and size == value.shape[-1] <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    return "varlen" if has_kernel else "cascade"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Context that forces a backend, for comparisons."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def _row(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [1, heads, tokens, dim] to [tokens, heads, dim]."""
    return x.squeeze(0).transpose(0, 1).to(dtype)


def _compute_dtype(query: Tensor) -> torch.dtype:
    """The autocast dtype, if enabled: layers may normalize queries and keys in float32, which sdpa would cast back."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.get_autocast_dtype(device)
    return query.dtype


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without metadata; packed calls pass a dummy mask
