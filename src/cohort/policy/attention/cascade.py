"""Attention over segments in two parts: each segment to itself, and branches to the root that they go on from.

The parts are merged by their log-sum-exps, and backward goes through each part with the merged output, as in ring
attention (arXiv:2310.01889). So a root's keys and values are read where they are, however many branches it has, and
nothing but queries, keys, values, outputs and log-sum-exps is kept for backward. Outputs and gradients of 16 bits are
float32 until all parts are in, and rounded once, where the kernel gives them out so.

S tokens of the row, P of the prefix, B stretches of L queries and K keys; heads and dim are those of one attention.

What comes out of attention of blocks of queries to blocks of keys is in float32 or wider: of 16 bits it is a part of a
sum, which is rounded when it is whole. B blocks of L queries and K keys; G query heads to each key head.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.segments import Parts, Places, RootBlock, Runs, Segments, Stretches

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    Args:
        query: [B, L, query heads, dim].
        key: [B, K, key heads, dim].
        value: [B, K, key heads, value dim].
        scale: multiplies the scores.
        causal: query i sees keys 0 .. i.
        hidden: [B, K], keys that no query sees; at least one other is in each block.

    Returns:
        outputs [B, L, query heads, value dim], and log-sum-exps [B, L, query heads].
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if _has_flash(query, value):
        q, k, v = _widened(q, k, v)
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=_mask(hidden, q), scale=scale)
    else:
        scores = _scores(q, k, scale, causal, hidden)
        lse = scores.logsumexp(dim=-1)
        out = wide_product(_grouped(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), k.shape[1]), v)
        out = out.view(*lse.shape, -1)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by these keys, where `out` and `lse` are of all keys that the queries see."""
    grad, q, k, v, o, log_sum = (x.transpose(1, 2) for x in (grad_out, query, key, value, out, lse))
    if _has_flash(query, value):
        grad, q, k, v, o = _widened(grad, q, k, v, o)
        grads = _flash_backward(grad, q, k, v, o, log_sum, 0.0, causal, attn_mask=_mask(hidden, q), scale=scale)
    else:
        grads = _backward(grad, q, k, v, o, log_sum, scale, causal, hidden)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel of CPUs computes it: it takes any strides and grouped heads, and one head size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _widened(*tensors: Tensor) -> Iterator[Tensor]:
    """For the fused kernel of CPUs, which would round to 16 bits, and whose backward of 16 bits is slower."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def _mask(hidden: Tensor | None, q: Tensor) -> Tensor | None:
    """What the fused kernel adds to scores of q [B, query heads, L, dim]: [B, 1, L, K], no memory for the queries."""
    if hidden is None:
        return None
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    return zero.where(~hidden, -torch.inf)[:, None, None].expand(-1, -1, q.shape[2], -1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, hidden: Tensor | None) -> Tensor:
    """Scores [B, query heads, L, K] in float32 or wider, -inf where a query does not see a key."""
    scores = wide_product(_grouped(q, k.shape[1]), k.mT).view(*q.shape[:3], -1) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if hidden is None else scores.masked_fill(hidden[:, None, None], -torch.inf)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices [B, heads, ..., ...], of narrow ones in float32 as fused attention has its scores."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` of tensors [B, heads, tokens, ...] by matrix products."""
    heads = k.shape[1]
    probs = torch.exp(_scores(q, k, scale, causal, hidden) - lse.unsqueeze(-1))
    delta = (grad.to(probs.dtype) * out.to(probs.dtype)).sum(dim=-1, keepdim=True)
    grad_probs = wide_product(_grouped(grad, heads), v.mT).view(probs.shape)
    grad_scores = _grouped((probs * (grad_probs - delta) * scale).to(q.dtype), heads)
    grad_q = wide_product(grad_scores, k).view(q.shape)
    grad_k = wide_product(grad_scores.mT, _grouped(q, heads))
    grad_v = wide_product(_grouped(probs.to(v.dtype), heads).mT, _grouped(grad, heads))
    return grad_q, grad_k, grad_v


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """[B, query heads, L, ...] as [B, key heads, G * L, ...]: query heads of one key head as further queries of it."""
    return x.reshape(x.shape[0], num_key_heads, -1, x.shape[-1])


KeyValue = tuple[Tensor, Tensor]
Where = TypeVar("Where", Stretches, Runs, contravariant=True)


class Kernel(Protocol, Generic[Where]):
    """Attention of the queries at some places to the keys at others, as `take` gives them out."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, queries: Where, keys: Where, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and their log-sum-exps in float32 or wider."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        queries: Where,
        keys: Where,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where `out` and `lse` are of all keys that the queries see."""
        ...


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
    return in_parts(query, key, value, segments.blocks, _Blocks(), prefix=prefix, scale=scale)


def in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Parts[Places],
    kernel: Kernel[Places],
    *,
    prefix: KeyValue | None,
    scale: float,
) -> Tensor:
    """Attention of a row by a kernel that computes parts of it; else as `cascade`."""
    out: Tensor = _Cascade.apply(query, key, value, *(prefix or (None, None)), parts, kernel, scale)
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
        parts: Parts[Any],
        kernel: Kernel[Any],
        scale: float,
    ) -> Tensor:
        def attend_to_own(own: Any) -> tuple[Tensor, ...]:
            taken = (own.take(x) for x in (query, key, value))
            return kernel.forward(*taken, queries=own, keys=own, causal=True, scale=scale)

        # what a kernel has put out may be kept by selective checkpointing, and is not written to
        out, lse = _joined(parts.own, attend_to_own, len(query), copy=bool(parts.shared))
        for block in parts.shared:
            root_out, root_lse = kernel.forward(
                block.branches.take(query),
                _of_roots(block, key, prefix_key),
                _of_roots(block, value, prefix_value),
                queries=block.branches,
                keys=block.roots,
                causal=False,
                scale=scale,
            )
            _merge(block.branches, out, lse, root_out, root_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, out, lse)
        ctx.parts, ctx.kernel, ctx.scale = parts, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        parts, kernel, scale = ctx.parts, ctx.kernel, ctx.scale

        def backward_of_own(own: Any) -> tuple[Tensor, ...]:
            taken = (own.take(x) for x in (grad_out, query, key, value, out, lse))
            grads: tuple[Tensor, ...] = kernel.backward(*taken, queries=own, keys=own, causal=True, scale=scale)
            return grads

        grad_query, grad_key, grad_value = _joined(parts.own, backward_of_own, len(query))
        grad_prefix: tuple[Tensor | None, Tensor | None] = (None, None)
        for block in parts.shared:
            grad_q, grad_k, grad_v = kernel.backward(
                block.branches.take(grad_out),
                block.branches.take(query),
                _of_roots(block, key, prefix_key),
                _of_roots(block, value, prefix_value),
                block.branches.take(out),
                block.branches.take(lse),
                queries=block.branches,
                keys=block.roots,
                causal=False,
                scale=scale,
            )
            block.branches.add(grad_query, grad_q)
            if block.of_prefix:
                grad_prefix = (block.roots.kept(grad_k), block.roots.kept(grad_v))
            else:
                block.roots.add(grad_key, grad_k)
                block.roots.add(grad_value, grad_v)
        every = (grad_query, grad_key, grad_value, *grad_prefix)
        return *(None if grad is None else grad.to(query.dtype) for grad in every), None, None, None


class _Blocks:
    """Dense blocks of queries and keys [B, L, heads, dim], padded."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        queries: Stretches,
        keys: Stretches,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, scale=scale, causal=causal, hidden=None if causal else _padding(keys))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        queries: Stretches,
        keys: Stretches,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = None if causal else _padding(keys)
        grad = _without_padding(queries, grad_out)
        return attend_backward(grad, query, key, value, out, lse, scale=scale, causal=causal, hidden=hidden)


def _joined(
    own: Sequence[Places], compute: Callable[[Places], tuple[Tensor, ...]], num_tokens: int, *, copy: bool = False
) -> list[Tensor]:
    """What comes of all stretches of a row, each [S, ...]. One part alone has all of them in the row's order."""
    rows: list[Tensor] = []
    for places in own:
        parts = compute(places)
        if len(own) == 1 and not copy:
            return [places.kept(x) for x in parts]
        rows = rows or [x.new_empty(num_tokens, *places.kept(x).shape[1:]) for x in parts]
        for row, x in zip(rows, parts, strict=True):
            places.put(row, x)
    return rows


def _merge(where: Places, out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Attention to further keys joins what is in `out` [S, heads, dim] and `lse` [S, heads]."""
    own_lse = where.take(lse)
    weight = torch.sigmoid(more_lse - own_lse).unsqueeze(-1)
    merged = where.take(out) * (1 - weight)  # as wide as the weight, without copies as wide of both
    where.put(out, merged.addcmul_(more_out, weight).to(out.dtype))
    where.put(lse, torch.logaddexp(own_lse, more_lse))


def _of_roots(block: RootBlock[Places], row: Tensor, prefix: Tensor | None) -> Tensor:
    """Keys or values of the roots of a block."""
    if not block.of_prefix:
        return block.roots.take(row)
    assert prefix is not None, "branches of the prefix need its keys and values"
    return block.roots.take(prefix)


def _padding(stretches: Stretches) -> Tensor | None:
    return stretches.padding


def _without_padding(stretches: Stretches, grad: Tensor) -> Tensor:
    """Gradients [B, L, ...], 0 for padding: a padded query adds nothing to keys and values."""
    if stretches.padding is None:
        return grad
    return grad.masked_fill_(stretches.padding[..., None, None], 0)  # which `take` has made
