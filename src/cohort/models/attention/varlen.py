"""Attention over packed rows with PyTorch's FlashAttention varlen kernel, on CUDA in 16 bits.

One call for segments attending to themselves and one for segments attending to their parents, merged as in `cascade`.
Keys of a parent are not copied. The kernel returns 16-bit outputs, so each part is rounded once.

T queries and K keys.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cohort.attention_mask import AttentionMetadata, VarlenBlock
from cohort.models.attention.cascade import KeyValue, cascade_with

# Called directly, since the backward of `torch.nn.attention.varlen` does not take merged log-sum-exps.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    *,
    prefix: KeyValue | None,
    scale: float,
) -> Tensor:
    """Attention of a packed row, see `cascade`. Query and value heads must have the same size."""
    return cascade_with(query, key, value, attn_metadata.varlen, _FlashKernel(), prefix=prefix, scale=scale)


class _FlashKernel:
    """The varlen kernel on queries [T, query heads, dim] and keys [K, key heads, dim]."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        queries: VarlenBlock,
        keys: VarlenBlock,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        lengths = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
        out, lse, *_ = _flash(query, key, value, *lengths, 0.0, causal, False, scale=scale, **_options())
        return out, lse.T

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        queries: VarlenBlock,
        keys: VarlenBlock,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused random state
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.T.contiguous(),
            *lengths,
            0.0,
            causal,
            no_dropout,
            no_dropout[:0],
            scale=scale,
        )
        return grads


@cache
def _options() -> dict[str, Any]:
    """Options that make results independent of the batch, if this PyTorch version has them."""
    known = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    return {"num_splits": 1} if "num_splits" in known else {}
