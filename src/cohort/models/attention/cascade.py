"""Cascade attention over a packed row: each segment attends to itself, and to its parent.

The two parts are merged by their log-sum-exps. Backward goes through each part with the merged output, as in ring
attention (arXiv:2310.01889). So the keys and values of a shared prefix are never copied, and only queries, keys,
values, outputs and log-sum-exps are saved for backward. With 16-bit inputs, partial outputs and gradients stay float32
if the kernel returns them so, and are rounded once, after merging.

What a layer may add is data, `AttentionSpec`. A sink is one more key with value 0: after merging, its logit joins the
log-sum-exp, so that backward needs no more than a gradient for the logit. Softcapped scores are computed in tiles.

S tokens of the row, P of the cached prefix; B sequences of L queries and K keys in a block; G query heads per key head.
"""

from collections.abc import Callable, Iterator, Sequence
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
    causal: bool  # of n queries and m keys, query i attends to keys 0 .. i + m - n, instead of all
    window: int | None = None  # and only to the last of these


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of a layer: what a query's scores are, and how far it sees."""

    scale: float  # multiplies the scores
    window: int | None = None  # a token attends to the last tokens of its sequence, itself included
    chunk: int | None = None  # and to its own chunk, of so many tokens, of its sequence
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # [query heads], logits of one more key, whose value is 0


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
    spec: AttentionSpec,
    *,
    prefix: KeyValue | None,
) -> Tensor:
    """Attention of a packed row in dense, padded blocks.

    Args:
        query: [S, query heads, dim].
        key: [S, key heads, dim].
        value: [S, key heads, value dim].
        attn_metadata: metadata of the row.
        spec: attention of the layer.
        prefix: keys and values [P, key heads, dim] of the cached prefix.

    Returns:
        [S, query heads, value dim]
    """
    kernel = _DenseKernel(spec.scale, spec.softcap)
    return cascade_with(kernel, query, key, value, attn_metadata, lambda m: m.padded, spec, prefix)


def cascade_with(
    kernel: Kernel[Block],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    blocks_of: Callable[[AttentionMetadata], CascadeBlocks[Block]],
    spec: AttentionSpec,
    prefix: KeyValue | None,
) -> Tensor:
    """Attention of a packed row with the given kernel and its kind of blocks; otherwise like `cascade`."""
    limited = attn_metadata.limited(spec.window, spec.chunk)
    if limited is not attn_metadata and prefix is not None:
        key, value = (torch.cat(pair) for pair in zip(prefix, (key, value), strict=True))
        prefix = None
    out: Tensor = _Cascade.apply(query, key, value, *(prefix or (None, None)), spec.sinks, blocks_of(limited), kernel)
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
        sinks: Tensor | None,
        blocks: CascadeBlocks[Any],
        kernel: Kernel[Any],
    ) -> Tensor:
        def causal_forward(span: Span[Any]) -> tuple[Tensor, ...]:
            return kernel.forward(span.queries.take(query), span.keys.take(key), span.keys.take(value), span)

        # selective checkpointing may save the output of a kernel, so it must not be written to
        out, lse = _compute_row(_causal_spans(blocks), causal_forward, len(query), copy=bool(blocks.prefix))
        for block in blocks.prefix:
            keys, values = _prefix_keys(block, key, prefix_key), _prefix_keys(block, value, prefix_value)
            span = Span(block.queries, block.keys, causal=False)
            root_out, root_lse = kernel.forward(block.queries.take(query), keys, values, span)
            _merge(block.queries, out, lse, root_out, root_lse)
        if sinks is not None:
            out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, sinks, out, lse)
        ctx.blocks, ctx.kernel = blocks, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, sinks, out, lse = ctx.saved_tensors
        blocks, kernel = ctx.blocks, ctx.kernel

        def causal_backward(span: Span[Any]) -> tuple[Tensor, ...]:
            grad, q, o, log_sum = (span.queries.take(x) for x in (grad_out, query, out, lse))
            k, v = (span.keys.take(x) for x in (key, value))
            grad_q, *grads = kernel.backward(grad, q, k, v, o, log_sum, span)
            if not blocks.keys:
                return grad_q, *grads
            for row, more in zip((grad_key, grad_value), grads, strict=True):
                span.keys.add(row, more)
            return (grad_q,)

        if blocks.keys:  # sequences have keys in common
            grad_key, grad_value = (upcast(torch.zeros_like(x)) for x in (key, value))
            (grad_query,) = _compute_row(_causal_spans(blocks), causal_backward, len(query))
        else:
            grad_query, grad_key, grad_value = _compute_row(_causal_spans(blocks), causal_backward, len(query))
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
        grad_sinks = None
        if sinks is not None:
            delta = (upcast(grad_out) * upcast(out)).sum(dim=-1)
            grad_sinks = -(torch.exp(sinks - lse) * delta).sum(dim=0).to(sinks.dtype)
        every = (grad_query, grad_key, grad_value, *grad_prefix)
        return *(None if grad is None else grad.to(query.dtype) for grad in every), grad_sinks, None, None


def _causal_spans(blocks: CascadeBlocks[Block]) -> list[Span[Block]]:
    """Causal attention within segments, or of segments to what is before them too."""
    pairs = zip(blocks.causal, blocks.keys or blocks.causal, strict=True)
    return [Span(queries, keys, causal=True, window=blocks.window) for queries, keys in pairs]


@dataclass(frozen=True, slots=True)
class _DenseKernel:
    """Attention of padded blocks: queries [B, L, query heads, dim], keys [B, K, key heads, dim]."""

    scale: float
    softcap: float | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, span: Span[PaddedBlock]) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        is_fused = self._is_fused(query, value)
        if is_fused:
            q, k, v = map(upcast, (q, k, v))  # the CPU kernel would round 16-bit outputs
        compute = self._flash if is_fused else self._products
        parts = [
            compute(q[:, :, tile.rows], k[:, :, tile.keys], v[:, :, tile.keys], tile)
            for tile in _tiles(span, q, k, is_fused=is_fused)
        ]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, span: Span[PaddedBlock]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = _without_padding(span.queries, grad)
        g, q, k, v, o, log_sum = (x.transpose(1, 2) for x in (grad, query, key, value, out, lse))
        is_fused = self._is_fused(query, value)
        if is_fused:
            g, q, k, v, o = map(upcast, (g, q, k, v, o))  # the CPU kernel's 16-bit backward is slower
        compute = self._flash_backward if is_fused else self._products_backward
        tiles = list(_tiles(span, q, k, is_fused=is_fused))
        grads = None if len(tiles) == 1 else tuple(upcast(torch.zeros_like(x)) for x in (q, k, v))
        for tile in tiles:
            grad_t, q_t, out_t, lse_t = (x[:, :, tile.rows] for x in (g, q, o, log_sum))
            more = compute(grad_t, q_t, out_t, lse_t, k[:, :, tile.keys], v[:, :, tile.keys], tile)
            for total, part, where in zip(grads or (), more, (tile.rows, tile.keys, tile.keys), strict=False):
                total[:, :, where] += part
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads or more)
        return grad_q, grad_k, grad_v

    def _is_fused(self, query: Tensor, value: Tensor) -> bool:
        """Whether PyTorch's flash attention for CPU computes this. It takes any strides and grouped heads."""
        return self.softcap is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, tile: "_Tile") -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, 0.0, tile.is_causal, attn_mask=tile.additive(q), scale=self.scale)
        return out, lse

    def _flash_backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, tile: "_Tile"
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = tile.additive(q)
        grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
            grad, q, k, v, out, lse, 0.0, tile.is_causal, attn_mask=mask, scale=self.scale
        )
        return grads

    def _products(self, q: Tensor, k: Tensor, v: Tensor, tile: "_Tile") -> tuple[Tensor, Tensor]:
        """`forward` of tensors [B, heads, tokens, ...] in plain matrix products."""
        scores = tile.masked(self._scores(q, k))
        lse = scores.logsumexp(dim=-1)
        out = wide_product(_grouped(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), k.shape[1]), v)
        return out.view(*lse.shape, -1), lse

    def _products_backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, tile: "_Tile"
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = k.shape[1]
        scores = self._scores(q, k)
        probs = torch.exp(tile.masked(scores) - lse.unsqueeze(-1))
        delta = (grad.to(probs.dtype) * out.to(probs.dtype)).sum(dim=-1, keepdim=True)
        grad_probs = wide_product(_grouped(grad, heads), v.mT).view(probs.shape)
        grad_scores = probs * (grad_probs - delta) * self.scale
        if self.softcap is not None:
            grad_scores *= 1 - (scores / self.softcap).square()
        grad_scores = _grouped(grad_scores.to(q.dtype), heads)
        grad_q = wide_product(grad_scores, k).view(q.shape)
        grad_k = wide_product(grad_scores.mT, _grouped(q, heads))
        grad_v = wide_product(_grouped(probs.to(v.dtype), heads).mT, _grouped(grad, heads))
        return grad_q, grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores [B, query heads, L, K] in float32 or wider, before masking."""
        scores = wide_product(_grouped(q, k.shape[1]), k.mT).view(*q.shape[:3], -1) * self.scale
        return scores if self.softcap is None else softcapped(scores, self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Some queries of a block, and the keys that they attend to."""

    rows: slice
    keys: slice
    is_causal: bool  # query i attends to keys 0 .. i, and `hidden` is None
    hidden: Tensor | None  # [B or 1, 1, L or 1, K], True at keys that a query does not attend to

    def additive(self, q: Tensor) -> Tensor | None:
        """The mask of the flash kernel, expanded over queries without a copy."""
        if self.hidden is None:
            return None
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        return zero.where(~self.hidden, -torch.inf).expand(-1, -1, q.shape[2], -1)

    def masked(self, scores: Tensor) -> Tensor:
        """Scores [B, query heads, L, K], -inf at keys that a query does not attend to."""
        hidden = self.hidden
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


# Scores of a tile at most, unless the block is small; queries of a tile in a window at least.
_TILE_SCORES = 2**24
_TILE_QUERIES = 64


def _tiles(span: Span[PaddedBlock], q: Tensor, k: Tensor, *, is_fused: bool) -> Iterator[_Tile]:
    """Cut a block [B, heads, L, ...] into tiles of queries, so that scores are few, and few are masked."""
    batch, heads, num_queries, _ = q.shape
    num_keys, device = k.shape[2], q.device
    rows = num_queries if is_fused else max(_TILE_QUERIES, _TILE_SCORES // (batch * heads * num_keys))
    if span.window is not None and batch == 1:
        rows = min(rows, max(_TILE_QUERIES, span.window))
    if span.keys is span.queries and span.window is None and num_queries <= rows:
        yield _Tile(rows=slice(None), keys=slice(None), is_causal=True, hidden=None)
        return
    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)
        first, end = 0, num_keys
        padding = _key_padding(span)
        hidden = None if padding is None else padding[:, None, None]
        if span.causal:
            last = torch.arange(start, stop, device=device)[None]  # key that a query sees, [B, L]
            if batch == 1:
                end = stop + num_keys - num_queries
                last = last + (num_keys - num_queries)
                first = max(0, end - (stop - start) + 1 - span.window) if span.window is not None else 0
            else:  # padded queries are copies of the last one
                queries, keys = (torch.tensor(x.lengths, device=device)[:, None] for x in (span.queries, span.keys))
                last = torch.minimum(last, queries - 1) + keys - queries
            column = torch.arange(first, end, device=device)
            hidden = column > last[:, None, :, None]
            if span.window is not None:
                hidden |= column <= last[:, None, :, None] - span.window
        yield _Tile(rows=slice(start, stop), keys=slice(first, end), is_causal=False, hidden=hidden)


def _compute_row(
    spans: Sequence[Span[Block]],
    compute: Callable[[Span[Block]], tuple[Tensor, ...]],
    num_tokens: int,
    *,
    copy: bool = False,
) -> list[Tensor]:
    """Compute all spans and write the results to rows [S, ...]. A single block is the row itself, without a copy."""
    rows: list[Tensor] = []
    for span in spans:
        parts, block = compute(span), span.queries
        if len(spans) == 1 and not copy:
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


def _without_padding(block: PaddedBlock, grad: Tensor) -> Tensor:
    """Zero gradients [B, L, ...] at padding, so that padded queries add nothing to keys and values."""
    if block.padding_mask is None:
        return grad
    return grad.masked_fill_(block.padding_mask[..., None, None], 0)  # in place: `take` has copied it


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


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    """Scores bounded by `softcap`, as in Gemma 2."""
    return torch.tanh(scores / softcap) * softcap


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """Reshape [B, query heads, L, ...] to [B, key heads, G * L, ...] for grouped-query attention."""
    return x.reshape(x.shape[0], num_key_heads, -1, x.shape[-1])
