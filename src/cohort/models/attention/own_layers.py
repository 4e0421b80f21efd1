"""Packed rows for layers that compute attention themselves instead of calling transformers' interface.

These are the layers of Falcon, BLOOM and MPT. If a row carries attention metadata, their own projections surround the
attention that other models use; otherwise they compute as before.

ALiBi (https://arxiv.org/abs/2108.12409) adds the position of a key, times a slope per head, to its scores. Here that is
one more feature of the keys. So kernels need not know of it, and all completions share the keys of their prompt.

S tokens of the row, H query heads, D head size.
"""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cohort.models.attention.interface import attention, compute_dtype

_patched: set[type] = set()  # classes whose forward knows packed rows


def has_own_attention(model: Any) -> bool:
    """Whether a model has layers that `support_own_attention` knows."""
    return any(type(m).__name__ in _FORWARDS for m in model.modules())


def support_own_attention(model: Any) -> None:
    """Let the layers of a model that do not call transformers' attention interface compute packed rows."""
    layer_class: Any
    for layer_class in {type(m) for m in model.modules() if type(m).__name__ in _FORWARDS} - _patched:
        library: Any = sys.modules[layer_class.__module__]
        if hasattr(library, "build_alibi_tensor"):
            library.build_alibi_tensor = _at_positions(library.build_alibi_tensor)
        layer_class.forward = _with_packed_rows(layer_class, _FORWARDS[layer_class.__name__])
        _patched.add(layer_class)


def _with_packed_rows(layer_class: Any, compute: Callable[..., Tensor]) -> Callable[..., Any]:
    """The forward of a layer, which computes a packed row if its attention mask or positions carry metadata."""
    own = layer_class.forward

    @wraps(own)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for carrier in (kwargs.get("attention_mask"), kwargs.get("position_ids")):
            if hasattr(carrier, "packed_attention"):
                return compute(self, carrier, hidden_states, *args, **kwargs), None
        return own(self, hidden_states, *args, **kwargs)

    return forward


def _at_positions(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A library's biases [H, 1, S] of keys, for a packed row from the position of each token in its own sequence."""

    @wraps(own)
    def build(attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        packed = getattr(attention_mask, "packed_attention", None)
        if packed is None:
            return own(attention_mask, *args, **kwargs)
        positions = packed.position_ids
        mask = torch.ones(1, int(positions.max()) + 1, dtype=torch.long, device=positions.device)
        return own(mask, *args, **kwargs)[..., positions]

    return build


def _falcon(
    layer: Any,
    carrier: Tensor,
    hidden_states: Tensor,
    *,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden_states)))
    if layer.new_decoder_architecture:  # keys are repeated for all query heads
        repeats = layer.num_heads // layer.num_kv_heads
        key, value = key[:, ::repeats], value[:, ::repeats]
    scale = layer.inv_norm_factor
    if alibi is not None:
        query, key, value = _with_bias(query, key, value, alibi * scale, scale)
    else:
        query, key = sys.modules[type(layer).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    return layer.dense(_attend(layer, carrier, query, key, value, scale))


def _bloom(layer: Any, carrier: Tensor, hidden_states: Tensor, residual: Tensor, *, alibi: Tensor, **_: Any) -> Tensor:
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    scale = layer.inv_norm_factor
    out = _attend(layer, carrier, *_with_bias(query, key, value, alibi, scale), scale)
    return layer.dense(out) + residual


def _mpt(layer: Any, carrier: Any, hidden_states: Tensor, *, position_bias: Tensor, **_: Any) -> Tensor:
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = (x.unflatten(-1, (layer.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
    bias = position_bias[..., carrier.packed_attention.position_ids] - position_bias[..., :1]  # rounds less
    scale = layer.softmax_scale
    return layer.out_proj(_attend(layer, carrier, *_with_bias(query, key, value, bias, scale), scale))


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
}


def _attend(layer: Any, carrier: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of a packed row, [1, S, H * D]."""
    out, _ = attention(layer, query, key, value, carrier, scaling=scale)
    return out[..., : layer.head_dim].flatten(2)


def _with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Add features to queries, keys and values [1, heads, S, D], so that `bias` of keys is added to the scores.

    In 16 bits, positions and factors are the sum of two numbers. Values are padded since kernels want one head size.
    """
    dtype, heads = compute_dtype(query), query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))  # slopes differ
    column = bias.to(torch.promote_types(bias.dtype, dtype)).view(1, heads, -1, 1)
    factor, factor_rest = _two_parts(torch.full_like(column, 1 / scale), dtype)
    column, column_rest = _two_parts(column, dtype)
    padding = torch.zeros_like(column).expand(-1, -1, -1, 5 + -query.shape[-1] % 8)  # kernels take multiples of 8
    query = torch.cat([query.to(dtype), factor, factor, factor_rest, padding], dim=-1)
    key = torch.cat([key.to(dtype), column, column_rest, column, padding], dim=-1)
    return query, key, torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))


def _two_parts(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two numbers of `dtype` that add up to `x` as nearly as possible."""
    first = x.to(dtype)
    return first, (x - first.to(x.dtype)).to(dtype)
