"""Attention over segments by PyTorch's compiled kernels for masks given as functions, on CUDA, in float32 above all.

S tokens of the row, P of the prefix; heads and dim are those of one attention.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as kernels
from torch.nn.attention.flex_attention import BlockMask

from cohort.segments import PREFIX, Segments

_BLOCK = 128  # queries and keys of a block that is skipped, or computed with or without a mask
_masks: WeakKeyDictionary[Segments, BlockMask] = WeakKeyDictionary()


def flex(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, prefix: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """Attention of a row, [S, query heads, value dim]. The arguments are those of `cascade`."""
    if prefix is not None:
        key, value = torch.cat([prefix[0], key]), torch.cat([prefix[1], value])
    if segments not in _masks:
        _masks[segments] = block_mask(segments)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    kernel = _compiled() if query.device.type == "cuda" else _eager
    out = kernel(q, k, v, block_mask=_masks[segments], scale=scale, enable_gqa=query.shape[1] > key.shape[1])
    return out.squeeze(0).transpose(0, 1)


_eager: Callable[..., Tensor] = kernels.flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_eager, dynamic=True)  # rows differ in length


def block_mask(segments: Segments) -> BlockMask:
    """Which of the P + S keys a row's queries see. Blocks follow from the segments' ends: no mask of S x S is made."""
    some, full = _blocks(segments)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full, segments.device),
        *_listed(full, segments.device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_sees(segments),
        seq_lengths=(segments.num_tokens, segments.prefix_tokens + segments.num_tokens),
    )


def _sees(segments: Segments) -> Callable[..., Tensor]:
    """Whether a query sees a key, by their numbers."""
    num_before = segments.prefix_tokens
    ids = np.repeat(np.arange(len(segments.lengths)), segments.lengths)
    segment = torch.from_numpy(ids).to(segments.device)
    root = torch.from_numpy(np.asarray(segments.roots)[ids]).to(segments.device)
    key_segment = torch.cat([segment.new_full((num_before,), PREFIX), segment])

    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        own = (segment[query] == key_segment[key]) & (key <= query + num_before)
        return own | (root[query] == key_segment[key])

    return sees


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


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each row's number of blocks [1, 1, rows], and their columns before the others, [1, 1, rows, columns]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    count = blocks.sum(axis=1, dtype=np.int32)
    return torch.from_numpy(count).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]
