"""Attention over segments by PyTorch's fused kernel for sequences of unequal length, on CUDA in 16 bits.

The kernel wants every sequence's keys in one run, so that a root's are copied for each of its branches.

S tokens of the row, P of the prefix; heads and dim are those of one attention.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen as kernels

from cohort.segments import Segments


def varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, prefix: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """Attention of a row, [S, query heads, dim]. The arguments are those of `cascade`, with heads of one size."""
    paths = segments.paths
    if prefix is not None:
        key, value = torch.cat([prefix[0], key]), torch.cat([prefix[1], value])
    if paths.keys is not None:
        key, value = (_Gather.apply(x, paths.keys) for x in (key, value))
    out = kernels.varlen_attn(
        query,
        key,
        value,
        paths.query_ends,
        paths.key_ends,
        paths.max_queries,
        paths.max_keys,
        scale=scale,
        **_options(),
    )
    assert isinstance(out, Tensor)  # log-sum-exps come only when asked for
    return out


class _Gather(torch.autograd.Function):
    """Tokens [S, ...] at positions; a token's gradients by all its copies are added up in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_tokens = len(row)
        return row.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_tokens, *grad.shape[1:], dtype=dtype)
        return total.index_add_(0, positions, grad.to(dtype)).to(grad.dtype), None


@cache
def _options() -> dict[str, Any]:
    """What makes the kernel causal, of grouped heads and the same in every batch, as this version of PyTorch says it.

    A causal window ends at a sequence's last key: its queries are the last of its tokens.
    """
    known = inspect.signature(kernels.varlen_attn).parameters
    wanted = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    return {name: x for name, x in wanted.items() if name in known}
