"""Attention over segments by PyTorch's compiled kernels for masks given as functions, on CUDA, in float32 above all.

Without being compiled it holds the scores of all queries and keys. So each layout of heads is compiled once, for rows
of any length, and where PyTorch would stop compiling, that is an error.

S tokens of the row, P of the prefix; heads and dim are those of one attention.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as kernels
from torch.nn.attention.flex_attention import BlockMask

from cohort.segments import PREFIX, ROOT, Segments, lay_out

_BLOCK = 128  # queries and keys of a block that is skipped, or computed with or without a mask
# Shorter rows are padded: sizes of 1 are compiled for themselves, and fewer queries than a block go another way.
_FEWEST_TOKENS = 2 * _BLOCK
_masks: WeakKeyDictionary[Segments, tuple[Tensor, ...]] = WeakKeyDictionary()


class _Case(NamedTuple):
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    dim: int
    key_heads: int
    value_dim: int
    scale: float
    with_gradient: bool


def flex(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, prefix: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """Attention of a row, [S, query heads, value dim]. The arguments are those of `cascade`.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: one case was compiled more often than PyTorch allows.
    """
    if segments not in _masks:
        _masks[segments] = mask_tensors(segments)
    missing = _FEWEST_TOKENS - segments.num_tokens
    if missing > 0:
        query, key, value = (functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (query, key, value))
    if prefix is not None:
        key, value = torch.cat([prefix[0], key]), torch.cat([prefix[1], value])
    q, k, v = (x.contiguous().transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 2)
    heads = *query.shape[1:], *value.shape[1:]
    case = _Case._make((query.device, query.dtype, *heads, scale, torch.is_grad_enabled()))
    out = _kernel(case)(q, k, v, *_masks[segments])
    return out.squeeze(0).transpose(0, 1)[: segments.num_tokens]


@cache
def _kernel(case: _Case) -> Callable[..., Tensor]:
    attend = _attend(case)
    return compiled(attend) if case.device.type == "cuda" else attend


def compiled(function: FunctionType, backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """A function compiled for sizes that are marked as dynamic, with a limit of compilations of its own.

    PyTorch counts compilations by code object, of which closures share one; so each gets a copy. Beyond the limit it
    would go on uncompiled, but for `fullgraph`.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    kernel: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
    return kernel


def _attend(case: _Case) -> FunctionType:
    scale, is_grouped = case.scale, case.query_heads > case.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        of_row = block_mask(q.shape[2], k.shape[2], *mask)
        out = kernels.flex_attention(q, k, v, block_mask=of_row, scale=scale, enable_gqa=is_grouped)
        assert isinstance(out, Tensor)  # log-sum-exps come only when asked for
        return out

    return attend  # type: ignore[return-value]  # mypy has no type of plain functions


def block_mask(num_queries: int, num_keys: int, *mask: Tensor) -> BlockMask:
    """Which keys a row's queries see, of its `mask_tensors`."""
    first_own, last_own, first_of_root, end_of_root, *blocks = mask

    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= first_own[query]) & (key <= last_own[query])
        return own | ((key >= first_of_root[query]) & (key < end_of_root[query]))

    make: Any = BlockMask  # the tensors are its arguments in their order
    return make((num_queries, num_keys), *blocks, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=sees)


def mask_tensors(segments: Segments) -> tuple[Tensor, ...]:
    """Which of the P + S keys a row's queries see. No mask of S x (P + S) is made: blocks follow from segments' ends.

    Returns:
        of each query the first and the last key of its own segment that it sees, the first one of its root and where
        that ends, [S] int32 each; and the tensors of a `BlockMask`. A short row's padding is a segment by itself.
    """
    missing, device = _FEWEST_TOKENS - segments.num_tokens, segments.device
    if missing > 0:
        lengths, roots = (*segments.lengths, missing), (*segments.roots, ROOT)
        segments = lay_out(lengths, roots, prefix_tokens=segments.prefix_tokens)
    some, full = _blocks(segments)
    listed = (*_listed(some & ~full), *_listed(full), *_listed((some & ~full).T), *_listed(full.T))
    # each by itself: as parts of one tensor they would begin elsewhere in every row, and be compiled for that
    tensors = tuple(torch.from_numpy(x).to(device, non_blocking=True) for x in _spans(segments) + listed)
    for x in tensors:
        torch._dynamo.mark_dynamic(x, [n for n, size in enumerate(x.shape) if size > 1])
    return tensors


def _spans(segments: Segments) -> tuple[np.ndarray, ...]:
    """Of each query: its segment's first key, itself, and its root's first key and end; 0 and 0 without a root."""
    lengths, roots, num_before = np.asarray(segments.lengths), np.asarray(segments.roots), segments.prefix_tokens
    starts = num_before + np.cumsum(lengths) - lengths
    first_of_root = np.where(roots >= 0, starts[roots], 0)
    of_segments = starts, first_of_root, first_of_root + np.asarray(segments.root_lengths)
    first_own, first, end = (np.repeat(x, lengths).astype(np.int32) for x in of_segments)
    return first_own, num_before + np.arange(len(first_own), dtype=np.int32), first, end


def _blocks(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Of which blocks some pair of query and key is seen, and of which every pair is, both [query, key blocks]."""
    num_before, num_queries = segments.prefix_tokens, segments.num_tokens
    shape = -(-num_queries // _BLOCK), -(-(num_before + num_queries) // _BLOCK)
    some, full = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    ends = np.cumsum(segments.lengths)
    for end, length, root in zip(ends, segments.lengths, segments.roots, strict=True):
        start = end - length
        first, last = start // _BLOCK, (end - 1) // _BLOCK
        inner = slice(-(-start // _BLOCK), end // _BLOCK)  # blocks of queries that are all of this segment
        for block in range(first, last + 1):
            last_seen = num_before + min(end, (block + 1) * _BLOCK) - 1
            some[block, (num_before + start) // _BLOCK : last_seen // _BLOCK + 1] = True
        for block in range(inner.start, inner.stop):
            full[block, -(-(num_before + start) // _BLOCK) : (num_before + block * _BLOCK + 1) // _BLOCK] = True
        if root >= 0 or root == PREFIX:
            begin, stop = (0, num_before) if root == PREFIX else num_before + ends[root] - [segments.lengths[root], 0]
            some[first : last + 1, begin // _BLOCK : (stop - 1) // _BLOCK + 1] = True
            full[inner, -(-begin // _BLOCK) : stop // _BLOCK] = True
    return some, full


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's number of blocks [1, 1, rows], and their columns before the others, [1, 1, rows, columns]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return blocks.sum(axis=1, dtype=np.int32)[None, None], order[None, None]
