"""Attention over segments in two parts: each segment to itself, and branches to the root that they go on from.

The parts are merged by their log-sum-exps, and backward goes through each part with the merged output, as in ring
attention (arXiv:2310.01889). So a root's keys and values are read where they are, however many branches it has, and
nothing but queries, keys, values, outputs and log-sum-exps is kept for backward. Outputs and gradients of 16 bits are
float32 until all parts are in, and rounded once.

S tokens of the row, P of the prefix, B stretches of L queries and K keys; heads and dim are those of one attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.policy.attention.primitive import attend, attend_backward
from cohort.segments import RootBlock, Segments, Stretches

KeyValue = tuple[Tensor, Tensor]


def cascade(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, prefix: KeyValue | None, scale: float
) -> Tensor:
    """Attention of a row.

    Args:
        query: [S, query heads, dim].
        key: [S, key heads, dim].
        value: [S, key heads, value dim].
        segments: of the row.
        prefix: keys and values [P, key heads, dim] that branches of PREFIX see.
        scale: multiplies the scores.

    Returns:
        [S, query heads, value dim]
    """
    out: Tensor = _Cascade.apply(query, key, value, *(prefix or (None, None)), segments, scale)
    return out


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        segments: Segments,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:2], value.shape[-1], dtype=wide)
        lse = query.new_empty(query.shape[:2], dtype=wide)
        for own in segments.own:
            block_out, block_lse = attend(*(own.take(x) for x in (query, key, value)), scale=scale, causal=True)
            own.put(out, block_out)
            own.put(lse, block_lse)
        for block in segments.shared:
            keys, values = _of_roots(block, key, prefix_key), _of_roots(block, value, prefix_value)
            root_out, root_lse = attend(
                block.branches.take(query), keys, values, scale=scale, hidden=_padding(block.roots)
            )
            _merge(block.branches, out, lse, root_out, root_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(x, dtype=lse.dtype) for x in (query, key, value))
        grad_prefix: tuple[Tensor | None, Tensor | None] = (None, None)
        for own in ctx.segments.own:
            grads = attend_backward(
                _without_padding(own, grad_out),
                *(own.take(x) for x in (query, key, value, out, lse)),
                scale=ctx.scale,
                causal=True,
            )
            for row, grad in zip((grad_query, grad_key, grad_value), grads, strict=True):
                own.put(row, grad)
        for block in ctx.segments.shared:
            grad_q, grad_k, grad_v = attend_backward(
                _without_padding(block.branches, grad_out),
                block.branches.take(query),
                _of_roots(block, key, prefix_key),
                _of_roots(block, value, prefix_value),
                block.branches.take(out),
                block.branches.take(lse),
                scale=ctx.scale,
                hidden=_padding(block.roots),
            )
            block.branches.add(grad_query, grad_q)
            if block.roots is None:
                grad_prefix = (grad_k[0], grad_v[0])
            else:
                block.roots.add(grad_key, grad_k)
                block.roots.add(grad_value, grad_v)
        every = (grad_query, grad_key, grad_value, *grad_prefix)
        return *(None if grad is None else grad.to(query.dtype) for grad in every), None, None


def _merge(where: Stretches, out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Attention to further keys joins what is in `out` [S, heads, dim] and `lse` [S, heads]."""
    own_out, own_lse = where.take(out), where.take(lse)
    weight = torch.sigmoid(more_lse - own_lse).unsqueeze(-1)
    where.put(out, torch.lerp(own_out, more_out, weight))
    where.put(lse, torch.logaddexp(own_lse, more_lse))


def _of_roots(block: RootBlock, row: Tensor, prefix: Tensor | None) -> Tensor:
    """Keys or values [B, K, heads, dim] of the roots of a block."""
    if block.roots is not None:
        return block.roots.take(row)
    assert prefix is not None, "branches of the prefix need its keys and values"
    return prefix.unsqueeze(0)


def _padding(stretches: Stretches | None) -> Tensor | None:
    return None if stretches is None else stretches.padding


def _without_padding(stretches: Stretches, grad: Tensor) -> Tensor:
    """Gradients [B, L, ...] of a row's tokens, 0 for padding: a padded query adds nothing to keys and values."""
    taken = stretches.take(grad)
    if stretches.padding is not None:
        taken.masked_fill_(stretches.padding[..., None, None], 0)
    return taken
