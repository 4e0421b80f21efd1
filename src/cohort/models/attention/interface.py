"""Register our attention with transformers, and choose its backend.

Kernels that are compiled at run time are tried out first: an unsupported GPU or driver, or a missing C compiler, costs
speed and not the run.

The attention metadata travels on the attention mask, which every layer passes on, while some drop keyword arguments.
(A context variable would not work: gradient checkpointing reruns layers in backward.)

S tokens of the row, P of the cached prefix.
"""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cohort.errors import describe_error
from cohort.models.attention.cascade import AttentionSpec, KeyValue, cascade, softcapped
from cohort.models.attention.decoding import DecodeBatch, decode_attention
from cohort.models.attention.varlen import varlen
from cohort.packing.segments import NO_PARENT, AttentionMetadata, build_attention_metadata
from cohort.packing.to_device import to_device

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


class KVCache(UserDict[int, tuple[Tensor, ...]]):
    """Keys and values of a prefix by layer index, each [1, key heads, P, dim], after rotary embedding.

    Layers with a recurrent state have it under a negative key, see `cohort.models.mixers`.

    Not a `dict`, because model wrappers copy dicts on the way to the layers.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAttention:
    """How the tokens of a row attend to each other: packed, or decoding."""

    position_ids: Tensor  # [S], of each token in its own sequence
    attn_metadata: AttentionMetadata | None = None  # of a packed row
    prefix: KVCache | None = None  # keys and values of the cached prefix
    captured: KVCache | None = None  # filled with keys and values, unless it has them (layers may be rerun in backward)
    decoding: Sequence[DecodeBatch] | None = None  # batches of completions; the row has one new token of each
    specs: dict[int, AttentionSpec] | None = None  # filled with what the layers ask for

    def as_mask(self) -> Tensor:
        """Return an attention mask that carries this. It has 4 dimensions, so transformers takes it as it is."""
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.position_ids.device)
        mask.packed_attention = self  # type: ignore[attr-defined]
        return mask


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: packed, decoding, or of padded rows.

    Args:
        module: the attention module of the layer.
        query: [1, query heads, S, dim] if packed or decoding.
        key: [1, key heads, S, dim].
        value: [1, key heads, S, dim].
        attention_mask: that of `PackedAttention.as_mask` if packed or decoding.
        kwargs: scaling and other arguments of the layer.

    Returns:
        [1, S, query heads, dim], and None for the attention weights.

    Raises:
        ValueError: the layer uses a feature that packed attention does not support.
    """
    packed: PackedAttention | None = getattr(attention_mask, "packed_attention", None)
    if packed is None:
        if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain_attention(query, key, value, attention_mask, make_spec(module, query, **kwargs)), None
    spec = make_spec(module, query, **kwargs)
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = query * _temperature_ratio(module, packed.position_ids).to(query.dtype)
    if packed.specs is not None:
        packed.specs[module.layer_idx] = spec
    if packed.decoding is not None:
        return decode_attention(module.layer_idx, query, key, value, packed.decoding, spec), None
    assert packed.attn_metadata is not None
    if packed.captured is not None:
        packed.captured.setdefault(module.layer_idx, (key, value))
    prefix = None
    if packed.prefix is not None:
        prefix_key, prefix_value = packed.prefix[module.layer_idx]
        prefix = prefix_key, prefix_value
    return packed_attention(query, key, value, packed.attn_metadata, spec, prefix), None


def make_spec(
    module: Any,
    query: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> AttentionSpec:
    """Collect what a layer asks for from its arguments. Chunks are not passed: only the config has them."""
    unknown = sorted(name for name, x in kwargs.items() if x is not None and name not in _IGNORED_ARGUMENTS)
    if unknown:  # biases
        raise ValueError(f"packed attention does not support {', '.join(unknown)}")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("packed attention must be causal and without dropout")
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    is_chunked = types is not None and types[module.layer_idx] == "chunked_attention"
    return AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=getattr(config, "attention_chunk_size", None) if is_chunked else None,
        softcap=softcap,
        sinks=s_aux,
    )


def _temperature_ratio(module: Any, position_ids: Tensor) -> Tensor:
    """Factors [S, 1] of queries that a layer without RoPE has scaled by their place in the row, as Llama 4 does.

    They should be scaled by their position in their own sequence (https://arxiv.org/abs/2501.19399).
    """
    places = torch.arange(len(position_ids), device=position_ids.device)
    scales = [
        torch.log1p(torch.floor((x.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for x in (position_ids, places)
    ]
    return (scales[0] / scales[1]).unsqueeze(-1)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Attention of padded rows in matrix products, [B, L, query heads, dim], where sdpa has no softcap and no sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT * spec.scale
    if spec.softcap is not None:
        scores = softcapped(scores, spec.softcap)
    if attention_mask is None:
        cached = scores.shape[-1] - scores.shape[-2]  # keys before the first query
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril(cached)
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (probs.to(value.dtype) @ value).transpose(1, 2)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    spec: AttentionSpec,
    prefix: KeyValue | None,
) -> Tensor:
    """Attention of a layer over a packed row, [1, S, query heads, dim]."""
    dtype = compute_dtype(query)
    q, k, v = (_row(x, dtype) for x in (query, key, value))
    if attn_metadata.prefix_tokens == 0:  # all completions have one token, so nothing attends to the prefix
        prefix = None
    prefix_rows = None if prefix is None else (_row(prefix[0], dtype), _row(prefix[1], dtype))
    name = choose_backend(q, v, softcap=spec.softcap)
    is_limited = spec.window is not None or spec.chunk is not None
    if is_limited and q.is_cuda and name == "varlen" and not _windows_agree(q.device, q.dtype, q.shape[-1]):
        name = "cascade"
    return _BACKENDS[name](q, k, v, attn_metadata, spec, prefix=prefix_rows).unsqueeze(0)


@cache
def _windows_agree(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the varlen kernel computes windows and chunks. The probe of a model may be too short to show it."""
    attn_metadata = to_device(build_attention_metadata([40, 30, 7], [NO_PARENT, 0, 0]), device)
    spec = AttentionSpec(scale=size**-0.5, window=16, chunk=24)

    def compare() -> Iterator[tuple[Tensor, Tensor]]:
        results = []
        for compute in (varlen, cascade):
            shapes = ((77, heads, size) for heads in (2, 1, 1))
            q, k, v = (probe_values(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
            out = compute(q, k, v, attn_metadata, spec, prefix=None)
            results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
        yield from ((a.float(), b.float()) for a, b in zip(*results, strict=True))

    with torch.enable_grad():
        return kernels_agree("Windows of the FlashAttention kernel", "matrix products", compare)


def choose_backend(query: Tensor, value: Tensor, *, softcap: float | None = None) -> Backend:
    """Choose the backend of packed attention by device, dtype, head sizes and what its kernels compute."""
    if _chosen:
        return _chosen[-1]
    size = query.shape[-1]
    has_kernel = (
        query.device.type == "cuda"
        and softcap is None
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


def compute_dtype(query: Tensor) -> torch.dtype:
    """The dtype of attention: that of autocast, if enabled.

    Layers may normalize queries and keys in float32, which sdpa would cast back.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.get_autocast_dtype(device)
    return query.dtype


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without metadata; packed calls pass a dummy mask
