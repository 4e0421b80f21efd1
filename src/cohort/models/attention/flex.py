"""Attention over packed rows with compiled FlexAttention, on CUDA, mainly in float32.

Uncompiled, FlexAttention materializes all scores. So it is compiled once per head configuration, for any row length,
and hitting the recompile limit is an error.

S tokens of the row, P of the cached prefix.
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

from cohort.attention_mask import CACHED_PREFIX, NO_PARENT, AttentionMetadata, build_attention_metadata

_BLOCK = 128  # block size of the mask, in queries and keys
# Shorter rows are padded: sizes of 1 are specialized, and fewer queries than a block take another code path.
_MIN_TOKENS = 2 * _BLOCK
_masks: WeakKeyDictionary[AttentionMetadata, tuple[Tensor, ...]] = WeakKeyDictionary()


class _Spec(NamedTuple):
    """What a kernel is specialized for."""

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    dim: int
    key_heads: int
    value_dim: int
    scale: float
    with_gradient: bool


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_metadata: AttentionMetadata,
    *,
    prefix: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """Attention of a packed row, see `cascade`.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: a kernel was compiled more often than PyTorch allows.
    """
    if attn_metadata not in _masks:
        _masks[attn_metadata] = mask_tensors(attn_metadata)
    missing = _MIN_TOKENS - attn_metadata.num_tokens
    if missing > 0:
        query, key, value = (functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (query, key, value))
    if prefix is not None:
        key, value = torch.cat([prefix[0], key]), torch.cat([prefix[1], value])
    q, k, v = (x.contiguous().transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 2)
    heads = *query.shape[1:], *value.shape[1:]
    spec = _Spec._make((query.device, query.dtype, *heads, scale, torch.is_grad_enabled()))
    out = _kernel(spec)(q, k, v, *_masks[attn_metadata])
    return out.squeeze(0).transpose(0, 1)[: attn_metadata.num_tokens]


@cache
def _kernel(spec: _Spec) -> Callable[..., Tensor]:
    attend = _attend(spec)
    return compiled(attend) if spec.device.type == "cuda" else attend


def compiled(function: FunctionType, backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """Compile a copy of a function, with a recompile limit of its own.

    PyTorch counts compilations per code object, which closures share, so each gets a copy. `fullgraph` turns hitting
    the limit into an error; otherwise the function would run uncompiled.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    kernel: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
    return kernel


def _attend(spec: _Spec) -> FunctionType:
    scale, is_grouped = spec.scale, spec.query_heads > spec.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        of_row = block_mask(q.shape[2], k.shape[2], *mask)
        out = kernels.flex_attention(q, k, v, block_mask=of_row, scale=scale, enable_gqa=is_grouped)
        assert isinstance(out, Tensor)  # log-sum-exps are returned on request only
        return out

    return attend  # type: ignore[return-value]  # mypy has no type for plain functions


def block_mask(num_queries: int, num_keys: int, *mask: Tensor) -> BlockMask:
    """Build the block mask of a row from its `mask_tensors`."""
    first_own, last_own, first_of_parent, end_of_parent, *blocks = mask

    def mask_mod(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= first_own[query]) & (key <= last_own[query])
        return own | ((key >= first_of_parent[query]) & (key < end_of_parent[query]))

    make: Any = BlockMask  # the tensors are in the order of its arguments
    return make((num_queries, num_keys), *blocks, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=mask_mod)


def mask_tensors(attn_metadata: AttentionMetadata) -> tuple[Tensor, ...]:
    """Compute the tensors of the block mask of a row, without a dense [S, P + S] mask.

    Returns:
        for each query, [S] int32 each: first and last key of its own segment, first key of its parent and the end of
        that; then the tensors of a `BlockMask`. Padding of a short row is a segment of its own.
    """
    missing, device = _MIN_TOKENS - attn_metadata.num_tokens, attn_metadata.device
    if missing > 0:
        lengths, parents = (*attn_metadata.lengths, missing), (*attn_metadata.parents, NO_PARENT)
        attn_metadata = build_attention_metadata(lengths, parents, prefix_tokens=attn_metadata.prefix_tokens)
    some, full = _blocks(attn_metadata)
    indices = (
        *_block_indices(some & ~full),
        *_block_indices(full),
        *_block_indices((some & ~full).T),
        *_block_indices(full.T),
    )
    # separate copies: views of one tensor would have varying offsets, and be recompiled for them
    tensors = tuple(torch.from_numpy(x).to(device, non_blocking=True) for x in _key_ranges(attn_metadata) + indices)
    for x in tensors:
        torch._dynamo.mark_dynamic(x, [n for n, size in enumerate(x.shape) if size > 1])
    return tensors


def _key_ranges(attn_metadata: AttentionMetadata) -> tuple[np.ndarray, ...]:
    """For each query: first key of its segment, itself, first key and end of its parent (0 and 0 without one)."""
    lengths, parents = np.asarray(attn_metadata.lengths), np.asarray(attn_metadata.parents)
    num_before = attn_metadata.prefix_tokens
    starts = num_before + np.cumsum(lengths) - lengths
    first_of_parent = np.where(parents >= 0, starts[parents], 0)
    of_segments = starts, first_of_parent, first_of_parent + np.asarray(attn_metadata.parent_lengths)
    first_own, first, end = (np.repeat(x, lengths).astype(np.int32) for x in of_segments)
    return first_own, num_before + np.arange(len(first_own), dtype=np.int32), first, end


def _blocks(attn_metadata: AttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Blocks in which some query attends to some key, and blocks without masking; both [query blocks, key blocks]."""
    num_before, num_queries = attn_metadata.prefix_tokens, attn_metadata.num_tokens
    shape = -(-num_queries // _BLOCK), -(-(num_before + num_queries) // _BLOCK)
    some, full = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    ends = np.cumsum(attn_metadata.lengths)
    for end, length, parent in zip(ends, attn_metadata.lengths, attn_metadata.parents, strict=True):
        start = end - length
        first, last = start // _BLOCK, (end - 1) // _BLOCK
        inner = slice(-(-start // _BLOCK), end // _BLOCK)  # query blocks entirely within this segment
        for block in range(first, last + 1):
            last_seen = num_before + min(end, (block + 1) * _BLOCK) - 1
            some[block, (num_before + start) // _BLOCK : last_seen // _BLOCK + 1] = True
        for block in range(inner.start, inner.stop):
            full[block, -(-(num_before + start) // _BLOCK) : (num_before + block * _BLOCK + 1) // _BLOCK] = True
        if parent != NO_PARENT:
            begin, stop = 0, num_before
            if parent != CACHED_PREFIX:
                begin, stop = num_before + ends[parent] - [attn_metadata.lengths[parent], 0]
            some[first : last + 1, begin // _BLOCK : (stop - 1) // _BLOCK + 1] = True
            full[inner, -(-begin // _BLOCK) : stop // _BLOCK] = True
    return some, full


def _block_indices(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of blocks per row [1, 1, rows], and column indices with those blocks first [1, 1, rows, columns]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return blocks.sum(axis=1, dtype=np.int32)[None, None], order[None, None]
