"""Cascade attention over a packed row: each segment attends to itself, and to its parent.

The two parts are merged by their log-sum-exps. Backward goes through each part with the merged output, as in ring
attention (arXiv:2310.01889). So the keys and values of a shared prefix are never copied, and only queries, keys,
values, outputs and log-sum-exps are saved for backward. With 16-bit inputs, partial outputs and gradients stay float32
if the kernel returns them so, and are rounded once, after merging.

S tokens of the row, P of the cached prefix; B sequences of L queries and K keys in a block; G query heads per key head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.packing.segments import AttentionMetadata, Block, CascadeBlocks, PaddedBlock, PrefixBlock

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

KeyValue = tuple[Tensor, Tensor]


class Span(NamedTuple, Generic[Block]):
    """Queries of a row, and the keys that each sequence of them attends to."""

    queries: Block
    keys: Block
    causal: bool  # query i of a sequence attends to its keys 0 .. i, instead of all


class Kernel(Protocol[Block]):
    """An attention kernel on queries and keys as returned by `take` of the blocks of a span."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, span: Span[Block]) -> tuple[Tensor, Tensor]:
        """Return outputs, and log-sum-exps of the scores in float32 or wider."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, span: Span[Block]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of query, key and value. `out` and `lse` are merged over all keys of the queries."""
        ...


def cascade(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    *,
    prefix: KeyValue | None,
    scale: float,
) -> Tensor:
    """Attention of a packed row in dense, padded blocks.

    Args:
        query: [S, query heads, dim].
        key: [S, key heads, dim].
        value: [S, key heads, value dim].
        attn_metadata: metadata of the row.
        prefix: keys and values [P, key heads, dim] of the cached prefix.
        scale: multiplies the scores.

    Returns:
        [S, query heads, value dim]
    """
    return cascade_with(_DenseKernel(scale), query, key, value, attn_metadata.padded, prefix)


def cascade_with(
    kernel: Kernel[Block],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: CascadeBlocks[Block],
    prefix: KeyValue | None,
) -> Tensor:
    """Attention of a packed row with the given kernel; otherwise like `cascade`."""
    out: Tensor = _Cascade.apply(query, key, value, *(prefix or (None, None)), blocks, kernel)
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
        blocks: CascadeBlocks[Any],
        kernel: Kernel[Any],
    ) -> Tensor:
        def causal_forward(own: Any) -> tuple[Tensor, ...]:
            q, k, v = (own.take(x) for x in (query, key, value))
            return kernel.forward(q, k, v, Span(own, own, causal=True))

        # selective checkpointing may save the output of a kernel, so it must not be written to
        out, lse = _compute_row(blocks.causal, causal_forward, len(query), copy=bool(blocks.prefix))
        for block in blocks.prefix:
            keys, values = _prefix_keys(block, key, prefix_key), _prefix_keys(block, value, prefix_value)
            span = Span(block.queries, block.keys, causal=False)
            root_out, root_lse = kernel.forward(block.queries.take(query), keys, values, span)
            _merge(block.queries, out, lse, root_out, root_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, out, lse)
        ctx.blocks, ctx.kernel = blocks, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        blocks, kernel = ctx.blocks, ctx.kernel

        def causal_backward(own: Any) -> tuple[Tensor, ...]:
            taken = (own.take(x) for x in (grad_out, query, key, value, out, lse))
            grads: tuple[Tensor, ...] = kernel.backward(*taken, Span(own, own, causal=True))
            return grads

        grad_query, grad_key, grad_value = _compute_row(blocks.causal, causal_backward, len(query))
        grad_prefix: tuple[Tensor | None, Tensor | None] = (None, None)
        for block in blocks.prefix:
            grad, queries, outs, lses = (block.queries.take(x) for x in (grad_out, query, out, lse))
            keys, values = _prefix_keys(block, key, prefix_key), _prefix_keys(block, value, prefix_value)
            span = Span(block.queries, block.keys, causal=False)
            grad_q, grad_k, grad_v = kernel.backward(grad, queries, keys, values, outs, lses, span)
            block.queries.add(grad_query, grad_q)
            if block.from_cache:
                grad_prefix = (block.keys.unpad(grad_k), block.keys.unpad(grad_v))
            else:
                block.keys.add(grad_key, grad_k)
                block.keys.add(grad_value, grad_v)
        every = (grad_query, grad_key, grad_value, *grad_prefix)
        return *(None if grad is None else grad.to(query.dtype) for grad in every), None, None


@dataclass(frozen=True, slots=True)
class _DenseKernel:
    """Attention of padded blocks: queries [B, L, query heads, dim], keys [B, K, key heads, dim]."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, span: Span[PaddedBlock]) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if _can_use_flash(query, value):
            q, k, v = map(upcast, (q, k, v))  # the CPU kernel would round 16-bit outputs
            out, lse = _flash(q, k, v, 0.0, span.causal, attn_mask=_additive_mask(span, q), scale=self.scale)
        else:
            scores = self._scores(q, k, span)
            lse = scores.logsumexp(dim=-1)
            out = wide_product(_grouped(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), k.shape[1]), v)
            out = out.view(*lse.shape, -1)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, span: Span[PaddedBlock]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = _without_padding(span.queries, grad)
        g, q, k, v, o, log_sum = (x.transpose(1, 2) for x in (grad, query, key, value, out, lse))
        if _can_use_flash(query, value):
            g, q, k, v, o = map(upcast, (g, q, k, v, o))  # the CPU kernel's 16-bit backward is slower
            mask = _additive_mask(span, q)
            grads = _flash_backward(g, q, k, v, o, log_sum, 0.0, span.causal, attn_mask=mask, scale=self.scale)
        else:
            grads = self._products_backward(g, q, k, v, o, log_sum, span)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, grad_k, grad_v

    def _products_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, span: Span[PaddedBlock]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of tensors [B, heads, tokens, ...] in plain matrix products."""
        heads = k.shape[1]
        probs = torch.exp(self._scores(q, k, span) - lse.unsqueeze(-1))
        delta = (grad.to(probs.dtype) * out.to(probs.dtype)).sum(dim=-1, keepdim=True)
        grad_probs = wide_product(_grouped(grad, heads), v.mT).view(probs.shape)
        grad_scores = _grouped((probs * (grad_probs - delta) * self.scale).to(q.dtype), heads)
        grad_q = wide_product(grad_scores, k).view(q.shape)
        grad_k = wide_product(grad_scores.mT, _grouped(q, heads))
        grad_v = wide_product(_grouped(probs.to(v.dtype), heads).mT, _grouped(grad, heads))
        return grad_q, grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor, span: Span[PaddedBlock]) -> Tensor:
        """Scores [B, query heads, L, K] in float32 or wider, -inf at masked keys."""
        scores = wide_product(_grouped(q, k.shape[1]), k.mT).view(*q.shape[:3], -1) * self.scale
        if span.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            return scores.masked_fill(later, -torch.inf)
        padding = _key_padding(span)
        return scores if padding is None else scores.masked_fill(padding[:, None, None], -torch.inf)


def _compute_row(
    own: Sequence[Block], compute: Callable[[Block], tuple[Tensor, ...]], num_tokens: int, *, copy: bool = False
) -> list[Tensor]:
    """Compute all blocks and write the results to rows [S, ...]. A single block is the row itself, without a copy."""
    rows: list[Tensor] = []
    for block in own:
        parts = compute(block)
        if len(own) == 1 and not copy:
            return [block.unpad(x) for x in parts]
        rows = rows or [x.new_empty(num_tokens, *block.unpad(x).shape[1:]) for x in parts]
        for row, x in zip(rows, parts, strict=True):
            block.put(row, x)
    return rows


def _merge(queries: Block, out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge attention to further keys into `out` [S, heads, dim] and `lse` [S, heads], by log-sum-exp."""
    own_lse = queries.take(lse)
    weight = torch.sigmoid(more_lse - own_lse).unsqueeze(-1)
    merged = queries.take(out) * (1 - weight)  # has the dtype of `weight`, without upcasting both inputs
    queries.put(out, merged.addcmul_(more_out, weight).to(out.dtype))
    queries.put(lse, torch.logaddexp(own_lse, more_lse))


def _prefix_keys(block: PrefixBlock[Block], row: Tensor, prefix: Tensor | None) -> Tensor:
    """Keys or values of the parents of a block."""
    if not block.from_cache:
        return block.keys.take(row)
    assert prefix is not None, "children of the cached prefix need its keys and values"
    return block.keys.take(prefix)


def _key_padding(span: Span[PaddedBlock]) -> Tensor | None:
    """[B, K], True at keys to ignore, never all of a sequence. Causality hides those of a causal span anyway."""
    return None if span.causal else span.keys.padding_mask


def _additive_mask(span: Span[PaddedBlock], q: Tensor) -> Tensor | None:
    """Additive mask [B, 1, L, K] for the flash kernel, expanded over queries without a copy."""
    padding = _key_padding(span)
    if padding is None:
        return None
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    return zero.where(~padding, -torch.inf)[:, None, None].expand(-1, -1, q.shape[2], -1)


def _without_padding(block: PaddedBlock, grad: Tensor) -> Tensor:
    """Zero gradients [B, L, ...] at padding, so that padded queries add nothing to keys and values."""
    if block.padding_mask is None:
        return grad
    return grad.masked_fill_(block.padding_mask[..., None, None], 0)  # in place: `take` has copied it


def _can_use_flash(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash attention for CPU supports the inputs. It takes any strides and grouped heads."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def upcast(tensor: Tensor) -> Tensor:
    """Cast to float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product [B, heads, ..., ...] that accumulates and returns 16-bit products in float32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """Reshape [B, query heads, L, ...] to [B, key heads, G * L, ...] for grouped-query attention."""
    return x.reshape(x.shape[0], num_key_heads, -1, x.shape[-1])
