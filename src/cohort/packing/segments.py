"""Attention metadata of a packed row: which tokens attend to which.

A packed row holds segments one after the other, without padding. A segment without a parent is a sequence of its own:
its tokens attend causally within it. A segment with a parent continues it: its tokens attend to all of the parent, and
causally within the segment. So a group's prompt is stored once and shared by its completions. All children of a parent
are adjacent. The parent can also be a cached prefix outside the row, whose keys and values are passed to attention.
Besides attention, only layers with a recurrent state mix tokens. They compute segments in blocks (`StateBlocks`), and a
segment with a parent starts from the parent's final state.

In layers with a window or chunks (`AttentionMetadata.limited`), a token attends to the last tokens of its own sequence,
of which some may be in the parent. Kernels take such a range of keys per sequence, so the keys of a segment are the
last tokens of the parent and its own ones, gathered.

S tokens of a row, B sequences of a block, L tokens of the longest of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohort.packing.to_device import to_device

NO_PARENT = -1
CACHED_PREFIX = -2  # parent of segments that continue the cached prefix
# Sequences of at most this many tokens are padded into one block: one large call beats many small ones. Longer ones
# are computed one by one, without padding or copies.
_SHORT = 64
# In a block of sequences that are longer, the shortest has this share of the longest's length.
_SIMILAR = 0.75


@dataclass(frozen=True, kw_only=True)
class PaddedBlock:
    """Sequences of a packed row as a padded block [B, L].

    A single sequence is a slice of the row. Several are gathered; padding repeats the last token of a sequence.
    """

    starts: tuple[int, ...]  # [B]
    lengths: tuple[int, ...]  # [B]
    positions: Tensor  # [B, L] int64, position in the row; empty for a single sequence
    valid: Tensor  # [B * L without padding] int64, indices of `positions` that are not padding; empty if there is none
    repeats: bool = False  # sequences may have tokens in common

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int], before: Sequence["_Range"] = ()) -> "PaddedBlock":
        """Make a block of the sequences that begin at `starts` and have `lengths` tokens, after those of `before`."""
        of_sequence = _positions(starts, lengths, before)
        length = np.array([len(p) for p in of_sequence])
        column = np.arange(length.max())
        positions = np.stack([p[np.minimum(column, len(p) - 1)] for p in of_sequence])
        is_slice = len(positions) == 1 and bool((positions[0] == positions[0, 0] + column).all())
        valid = np.flatnonzero(column < length[:, None])
        empty = np.zeros(0, dtype=np.int64)
        return PaddedBlock(
            starts=tuple(positions[:, 0].tolist()),
            lengths=tuple(length.tolist()),
            positions=torch.from_numpy(empty if is_slice else positions),
            valid=torch.from_numpy(valid if len(valid) < positions.size else empty),
            repeats=bool(before),
        )

    def take(self, row: Tensor) -> Tensor:
        """Return the tokens of a row [S, ...] as a padded block [B, L, ...]."""
        if not len(self.positions):
            return row.narrow(0, self.starts[0], self.lengths[0]).unsqueeze(0)
        return row.index_select(0, self.positions.flatten()).unflatten(0, self.positions.shape)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Write values [B, L, ...] to their positions in a row [S, ...], dropping padding."""
        if not len(self.positions):
            self.take(row).copy_(values)
        else:
            row.index_copy_(0, self._valid_positions, self.unpad(values))

    def add(self, row: Tensor, values: Tensor) -> None:
        """Add values [B, L, ...] at their positions in a row [S, ...], dropping padding."""
        if not len(self.positions):
            self.take(row).add_(values)
        else:
            _add(row, self._valid_positions, self.unpad(values), self.repeats)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, L."""
        return max(self.lengths)

    @cached_property
    def padding_mask(self) -> Tensor | None:
        """True at padding, [B, L]; None if there is no padding."""
        if not len(self.valid):
            return None
        mask = torch.ones(self.positions.numel(), dtype=torch.bool, device=self.positions.device)
        return mask.index_fill_(0, self.valid, False).view(self.positions.shape)

    @cached_property
    def _valid_positions(self) -> Tensor:
        """Positions in the row of all tokens but padding."""
        return self.unpad(self.positions)

    def unpad(self, values: Tensor) -> Tensor:
        """Flatten values [B, L, ...] to [tokens, ...], dropping padding."""
        flat = values.flatten(0, 1)
        return flat.index_select(0, self.valid) if len(self.valid) else flat


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenBlock:
    """Sequences of a packed row, concatenated without padding, for variable-length (`cu_seqlens`) kernels.

    Adjacent sequences are a slice of the row. Others are gathered.
    """

    start: int  # of the slice
    num_tokens: int
    positions: Tensor  # [num_tokens] int64, position in the row; empty for a slice
    cu_seqlens: Tensor  # [B + 1] int32, cumulative sequence lengths
    max_seqlen: int
    repeats: bool = False  # sequences may have tokens in common

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int], before: Sequence["_Range"] = ()) -> "VarlenBlock":
        """Make a block of the sequences that begin at `starts` and have `lengths` tokens, after those of `before`."""
        of_sequence = _positions(starts, lengths, before)
        length = [len(p) for p in of_sequence]
        positions = np.concatenate(of_sequence)
        is_slice = bool((positions == positions[0] + np.arange(len(positions))).all())
        return VarlenBlock(
            start=int(positions[0]),
            num_tokens=len(positions),
            positions=torch.from_numpy(np.zeros(0, np.int64) if is_slice else positions),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *length]).astype(np.int32)),
            max_seqlen=max(length),
            repeats=bool(before),
        )

    def take(self, row: Tensor) -> Tensor:
        """Return the tokens of a row [S, ...] as [num_tokens, ...]."""
        if len(self.positions):
            return row.index_select(0, self.positions)
        return row.narrow(0, self.start, self.num_tokens)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Write values [num_tokens, ...] to their positions in a row [S, ...]."""
        if len(self.positions):
            row.index_copy_(0, self.positions, values)
        else:
            self.take(row).copy_(values)

    def add(self, row: Tensor, values: Tensor) -> None:
        """Add values [num_tokens, ...] at their positions in a row [S, ...]."""
        if len(self.positions):
            _add(row, self.positions, values, self.repeats)
        else:
            self.take(row).add_(values)

    def unpad(self, values: Tensor) -> Tensor:
        """Return `values` [num_tokens, ...]: there is no padding."""
        return values


_Range = tuple[int, int]  # start and length
_Piece = tuple[_Range, _Range, _Range]  # a piece of a segment in the row and among the keys, and the keys before it


def _positions(starts: Sequence[int], lengths: Sequence[int], before: Sequence[_Range]) -> list[np.ndarray]:
    """Positions of each sequence, after those of the tokens before it, which may be elsewhere in the row."""
    own = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    if not before:
        return own
    return [np.concatenate([np.arange(b[0], sum(b)), p]) for b, p in zip(before, own, strict=True)]


def _add(row: Tensor, positions: Tensor, values: Tensor, repeats: bool) -> None:
    """Add values at positions of a row, with the same rounding every time: on GPUs `index_add_` adds in any order."""
    if repeats and row.is_cuda:
        row.index_put_((positions,), values.to(row.dtype), accumulate=True)
    else:
        row.index_add_(0, positions, values.to(row.dtype))


Block = TypeVar("Block", PaddedBlock, VarlenBlock)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBlock(Generic[Block]):
    """Attention of segments to their parents: sequence b of `queries` attends to all of sequence b of `keys`."""

    queries: Block  # all children of a parent as one sequence
    keys: Block  # the parents
    from_cache: bool  # the keys are those of the cached prefix, not of the row


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeBlocks(Generic[Block]):
    """The two parts of cascade attention, merged by their log-sum-exps.

    Every token is in one block of `causal`. Tokens of segments with a parent are also in one block of `prefix`.
    """

    causal: tuple[Block, ...]  # causal attention within segments
    prefix: tuple[PrefixBlock[Block], ...]
    keys: tuple[Block, ...] = ()  # of each causal block, ending with its own tokens; empty: its own tokens
    window: int | None = None  # of causal attention


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlock:
    """Segments that a layer with a recurrent state computes together.

    They are padded at the end, which changes none of their outputs but their final states. So segments whose final
    states are kept have one length.
    """

    segments: PaddedBlock
    starts: Tensor  # [B] int64, which kept state each segment starts from; empty: none
    keeps: bool  # whether the final states are kept, after those of earlier blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlocks:
    """All segments of a row. The final state of a cached prefix, if it has children, is the first kept state."""

    blocks: tuple[StateBlock, ...]
    order: Tensor  # [S] int64, place of each token of the row in the blocks' outputs without padding
    kept: Tensor  # int64, place of each segment's final state among the kept ones, for segments in their order


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMetadata:
    """The segments of a packed row, and attention over them for dense and for variable-length kernels."""

    lengths: tuple[int, ...]  # of each segment
    parents: tuple[int, ...]  # index of each segment's parent, or NO_PARENT, or CACHED_PREFIX
    prefix_tokens: int  # of the cached prefix
    padded: CascadeBlocks[PaddedBlock]  # short segments together, long ones one by one
    varlen: CascadeBlocks[VarlenBlock]  # all segments together

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, S."""
        return sum(self.lengths)

    @cached_property
    def parent_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment's parent, 0 without one."""
        outside = {NO_PARENT: 0, CACHED_PREFIX: self.prefix_tokens}
        return tuple(outside[parent] if parent in outside else self.lengths[parent] for parent in self.parents)

    @cached_property
    def max_context_tokens(self) -> int:
        """Most tokens that any token attends to."""
        return max(map(sum, zip(self.lengths, self.parent_lengths, strict=True)))

    def limited(self, window: int | None, chunk: int | None) -> "AttentionMetadata":
        """Return the metadata for layers in which tokens see less than all tokens before them.

        Args:
            window: a token attends to the last tokens of its sequence, itself included.
            chunk: sequences are cut every so many tokens, and a token attends to its own chunk.

        Returns:
            This object if nothing is out of sight. Otherwise nothing is left in `prefix`; and where there is a cached
            prefix, keys are positions in the prefix and the row, one after the other.
        """
        if self.max_context_tokens <= min(window or self.max_context_tokens, chunk or self.max_context_tokens):
            return self
        if (window, chunk) not in self._limited:
            pieces = list(self._pieces(window, chunk))
            sizes = [(q[1], (k[1] + b[1]) // 4) for q, k, b in pieces]  # more keys than queries, in few calls
            blocks = [[pieces[n] for n in block] for block in _group_short(sizes)]
            padded = _limited_blocks(PaddedBlock.of, blocks, window)
            varlen = _limited_blocks(VarlenBlock.of, [pieces], window)
            device = self.varlen.causal[0].cu_seqlens.device
            self._limited[window, chunk] = to_device(replace(self, padded=padded, varlen=varlen), device)
        return self._limited[window, chunk]

    def state_blocks(self, *, keep_all: bool) -> StateBlocks:
        """Return the blocks for layers with a recurrent state.

        Args:
            keep_all: keep the final states of all segments without a parent, not only of those that others continue.
        """
        if keep_all not in self._state_blocks:
            device = self.varlen.causal[0].cu_seqlens.device
            blocks = _build_state_blocks(self.lengths, self.parents, keep_all=keep_all)
            self._state_blocks[keep_all] = to_device(blocks, device)
        return self._state_blocks[keep_all]

    @cached_property
    def _state_blocks(self) -> dict[bool, StateBlocks]:
        return {}

    @cached_property
    def _limited(self) -> dict[tuple[int | None, int | None], "AttentionMetadata"]:
        return {}

    def _pieces(self, window: int | None, chunk: int | None) -> Iterator[_Piece]:
        """Yield the segments, cut into chunks."""
        starts = (np.cumsum(self.lengths) - self.lengths).tolist()
        ends = {CACHED_PREFIX: self.prefix_tokens, NO_PARENT: 0}  # of parents
        for start, length, parent, offset in zip(starts, self.lengths, self.parents, self.parent_lengths, strict=True):
            end = ends[parent] if parent in ends else self.prefix_tokens + starts[parent] + self.lengths[parent]
            seen = min(window - 1 if window else offset, offset % chunk if chunk else offset, offset)
            cuts = range(chunk - offset % chunk if chunk else length, length, chunk or length)
            for begin, stop in pairwise([0, *cuts, length]):
                before = (end - seen, seen) if begin == 0 else (0, 0)
                yield (start + begin, stop - begin), (self.prefix_tokens + start + begin, stop - begin), before


def build_attention_metadata(
    lengths: Sequence[int], parents: Sequence[int], *, prefix_tokens: int = 0
) -> AttentionMetadata:
    """Build the attention metadata of consecutive segments.

    Args:
        lengths: tokens of each segment, at least 1.
        parents: index of each segment's parent, or NO_PARENT, or CACHED_PREFIX. The children of a parent are adjacent,
            before or after it.
        prefix_tokens: tokens of the cached prefix, whose keys and values are passed to attention; 0 without one.
    """
    starts = (np.cumsum(lengths) - lengths).tolist()
    children: dict[int, tuple[int, int]] = {}  # parent -> start and length of its children together
    for parent, run in groupby(range(len(lengths)), key=lambda n: parents[n]):
        if parent == NO_PARENT:
            continue
        assert parent not in children, "children of a parent must be adjacent"
        numbers = list(run)
        children[parent] = starts[numbers[0]], sum(lengths[n] for n in numbers)
    assert (CACHED_PREFIX in children) == (prefix_tokens > 0), (
        "prefix_tokens must be set if and only if it has children"
    )
    cached = [(0, prefix_tokens, *children.pop(CACHED_PREFIX))] if prefix_tokens else []
    families = [(starts[parent], lengths[parent], *children[parent]) for parent in children]
    return AttentionMetadata(
        lengths=tuple(lengths),
        parents=tuple(parents),
        prefix_tokens=prefix_tokens,
        padded=CascadeBlocks(
            causal=tuple(
                PaddedBlock.of([starts[n] for n in block], [lengths[n] for n in block])
                for block in _group_short([(length,) for length in lengths])
            ),
            prefix=_prefix_blocks(
                PaddedBlock.of,
                cached,
                [[families[n] for n in block] for block in _group_short([(f[3], f[1]) for f in families])],
            ),
        ),
        varlen=CascadeBlocks(
            causal=(VarlenBlock.of(starts, lengths),),
            prefix=_prefix_blocks(VarlenBlock.of, cached, [families]),
        ),
    )


_Family = tuple[int, int, int, int]  # start and length of a parent, and of all its children


def _limited_blocks(
    of: Callable[[Sequence[int], Sequence[int], Sequence[_Range]], Block],
    blocks: Sequence[Sequence[_Piece]],
    window: int | None,
) -> CascadeBlocks[Block]:
    """Build blocks of pieces that attend to themselves and to the keys before them."""
    queries, keys = [], []
    for block in blocks:
        queries.append(of([rows[0] for rows, _, _ in block], [rows[1] for rows, _, _ in block], []))
        keys.append(of([own[0] for _, own, _ in block], [own[1] for _, own, _ in block], [b for _, _, b in block]))
    return CascadeBlocks(causal=tuple(queries), prefix=(), keys=tuple(keys), window=window)


def _prefix_blocks(
    of: Callable[[Sequence[int], Sequence[int]], Block], cached: list[_Family], blocks: Sequence[list[_Family]]
) -> tuple[PrefixBlock[Block], ...]:
    """Build blocks of children that attend to their parents; first those of the cached prefix."""
    prefix = []
    for block in filter(None, [cached, *blocks]):
        parent_starts, parent_lengths, starts, lengths = zip(*block, strict=True)
        prefix.append(
            PrefixBlock(queries=of(starts, lengths), keys=of(parent_starts, parent_lengths), from_cache=block is cached)
        )
    return tuple(prefix)


def _group_short(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Group item indices into blocks: all short items together, each long one alone."""
    short = [n for n, size in enumerate(sizes) if max(size) <= _SHORT]
    return ([short] if short else []) + [[n] for n, size in enumerate(sizes) if max(size) > _SHORT]


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length into blocks, longest first. Return indices of the sequences of each block."""
    blocks: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[blocks[-1][0]] if blocks else 0
        if blocks and (longest <= _SHORT or lengths[n] >= _SIMILAR * longest):
            blocks[-1].append(n)
        else:
            blocks.append([n])
    return blocks


def _build_state_blocks(lengths: Sequence[int], parents: Sequence[int], *, keep_all: bool) -> StateBlocks:
    every = range(len(lengths))
    kept = [n for n in every if parents[n] == NO_PARENT and (keep_all or n in parents)]
    members = [([n for n in kept if lengths[n] == length], True) for length in dict.fromkeys(lengths[n] for n in kept)]
    for has_parent in (False, True):
        rest = [n for n in every if (parents[n] != NO_PARENT) == has_parent and n not in kept]
        members += [([rest[n] for n in block], False) for block in group_by_length([lengths[n] for n in rest])]
    before = [CACHED_PREFIX] if CACHED_PREFIX in parents else []
    of_state = [*before, *(n for block, keeps in members if keeps for n in block)]
    number = {n: place for place, n in enumerate(of_state)}
    starts = np.cumsum(lengths) - lengths
    blocks = tuple(
        StateBlock(
            segments=PaddedBlock.of([int(starts[n]) for n in block], [lengths[n] for n in block]),
            starts=torch.tensor([number[parents[n]] for n in block if parents[n] != NO_PARENT], dtype=torch.int64),
            keeps=keeps,
        )
        for block, keeps in members
        if block
    )
    places = np.concatenate([starts[n] + np.arange(lengths[n]) for block, _ in members for n in block])
    return StateBlocks(
        blocks=blocks,
        order=torch.from_numpy(np.argsort(places)),
        kept=torch.tensor([number[n] for n in kept], dtype=torch.int64),
    )
