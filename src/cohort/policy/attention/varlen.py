"""Attention over segments by PyTorch's fused kernel for sequences of unequal length, on CUDA in 16 bits.

Each segment to itself, and the branches of each root to the root, merged as in `cascade`: one call for either, and no
root's keys are copied for its branches. The kernel rounds what it puts out to 16 bits, and so every part once.

T queries and K keys; heads and dim are those of one attention.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cohort.policy.attention.cascade import KeyValue, in_parts
from cohort.segments import Runs, Segments

# What `torch.nn.attention.varlen` calls, whose own backward knows no log-sum-exps of other keys.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, prefix: KeyValue | None, scale: float
) -> Tensor:
    """Attention of a row, [S, query heads, dim]. The arguments are those of `cascade`, with heads of one size."""
    return in_parts(query, key, value, segments.runs, _Flash(), prefix=prefix, scale=scale)


class _Flash:
    """The fused kernel on queries [T, query heads, dim] and keys [K, key heads, dim]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, queries: Runs, keys: Runs, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        lengths = (queries.ends, keys.ends, queries.longest, keys.longest)
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
        queries: Runs,
        keys: Runs,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (queries.ends, keys.ends, queries.longest, keys.longest)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of its random numbers
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
    """What makes the kernel the same in every batch, if this version of PyTorch can say it."""
    known = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    return {"num_splits": 1} if "num_splits" in known else {}
