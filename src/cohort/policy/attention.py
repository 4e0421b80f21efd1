"""Attention over the segments of a packed row, behind the interface of transformers.

The segments travel with each call of the model, as a keyword argument that its layers hand on. A variable that is set
around the call would not do: gradient checkpointing runs the layers again in backward.

S tokens of the row, B segments of a block, L queries of each, K + L keys; heads and dim are those of one attention.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cohort.segments import SegmentBlock, Segments

NAME = "cohort"
# What layers hand to an attention function and what changes nothing in training without a cache.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "layer_idx"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: over segments where they are given, and otherwise the library's own.

    Args:
        module: the layer's attention.
        query: [1, query heads, S, dim] with segments.
        key: [1, key heads, S, dim].
        value: [1, key heads, S, dim].
        attention_mask: not looked at with segments.
        segments: of the row.
        kwargs: the layer's scaling, dropout and what else it has.

    Returns:
        [1, S, query heads, dim], and None in place of the attention's weights.

    Raises:
        ValueError: the layer wants something that attention over segments does not do.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return packed_attention(module, query, key, value, segments, **kwargs), None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention over segments: each block's tokens are gathered from the row, and the outputs put back, [1, S, ...]."""
    unknown = sorted(name for name, x in kwargs.items() if x is not None and name not in _WITHOUT_EFFECT)
    if unknown:  # windows, softcaps, sinks, biases
        raise ValueError(f"attention over segments does not know {', '.join(unknown)}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("attention over segments is causal")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [S, heads, dim], as they lie in memory
    blocks = [_block(q, k, v, block, scaling, dropout) for block in segments.blocks]
    return torch.cat(blocks).index_select(0, segments.inverse).unsqueeze(0)


def _block(
    query: Tensor, key: Tensor, value: Tensor, block: SegmentBlock, scaling: float | None, dropout: float
) -> Tensor:
    """Attention of one block with tokens of the row [S, heads, dim]; its outputs [B * L, query heads, dim]."""
    q = _gather(query, block.queries)
    k, v = _gather(key, block.keys), _gather(value, block.keys)
    if block.mask is not None and q.device.type == "cuda" and q.shape[1] > k.shape[1]:
        # fused kernels of GPUs take a mask or grouped heads, not both
        out = _folded(q, k, v, block.mask, scaling, dropout)
    else:
        out = _plain(q, k, v, block.mask, scaling, dropout)
    return out.transpose(1, 2).flatten(0, 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float) -> Tensor:
    """Attention of q [B, query heads, L, dim] to k and v [B, key heads, K + L, dim], causal without a mask."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] > k.shape[1],
    )


def _folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, dropout: float) -> Tensor:
    """The same with the query heads of one key head as further queries of it."""
    group = q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, group)).flatten(2, 3)  # [B, key heads, group * L, dim]
    out = _plain(folded, k, v, mask.repeat(1, 1, group, 1), scaling, dropout)
    return out.unflatten(2, (group, -1)).flatten(1, 2)


def _gather(row: Tensor, positions: Tensor) -> Tensor:
    """Tokens of a row [S, heads, dim] at positions [B, L]: [B, heads, L, dim]."""
    return row.index_select(0, positions.flatten()).unflatten(0, positions.shape).transpose(1, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # of calls without segments; with them a made mask goes in
