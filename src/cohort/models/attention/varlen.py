"""Attention over packed rows with PyTorch's FlashAttention varlen kernel, on CUDA in 16 bits.

One call for segments attending to themselves and one for segments attending to their parents, merged as in `cascade`.
Keys of a parent are not copied. The kernel returns 16-bit outputs, so each part is rounded once.

T queries and K keys.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cohort.models.attention.cascade import AttentionSpec, KeyValue, Span, cascade_with
from cohort.packing.segments import AttentionMetadata, VarlenBlock

# Called directly, since the backward of `torch.nn.attention.varlen` does not take merged log-sum-exps.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    spec: AttentionSpec,
    *,
    prefix: KeyValue | None,
) -> Tensor:
    """Attention of a packed row, see `cascade`. Query and value heads must have the same size; no softcap."""
    return cascade_with(_FlashKernel(spec.scale), query, key, value, attn_metadata, lambda m: m.varlen, spec, prefix)


@dataclass(frozen=True, slots=True)
class _FlashKernel:
    """The varlen kernel on queries [T, query heads, dim] and keys [K, key heads, dim]."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, span: Span[VarlenBlock]) -> tuple[Tensor, Tensor]:
        options = _options() | _window(span)
        out, lse, *_ = _flash(query, key, value, *_lengths(span), 0.0, span.causal, False, scale=self.scale, **options)
        return out, lse.T

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, span: Span[VarlenBlock]
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (grad, query, key, value, out, lse.T.contiguous())
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state of dropout
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            *tensors, *_lengths(span), 0.0, span.causal, unused, unused[:0], scale=self.scale, **_window(span)
        )
        return grads


def _lengths(span: Span[VarlenBlock]) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = span.queries, span.keys
    return queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen


def _window(span: Span[VarlenBlock]) -> dict[str, int]:
    """The keys that a query attends to, counted from its own; queries are the last of the keys."""
    return {} if span.window is None else {"window_size_left": span.window - 1, "window_size_right": 0}


@cache
def _options() -> dict[str, Any]:
    """Options that make results independent of the batch, if this PyTorch version has them."""
    known = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    return {"num_splits": 1} if "num_splits" in known else {}
