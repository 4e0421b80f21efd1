"""Which tokens of a packed row attend to which.

A row holds segments one after the other, without padding. A root segment is a sequence of its own: its tokens see the
tokens before them in it. A branch segment goes on from a root: its tokens see all of the root, and those before them in
the branch. All branches of a root follow each other. A root can also be a prefix that is not in the row, of which
attention is given keys and values. Nothing else of a model looks at other tokens, so that only attention has to know.

S tokens of a row, B stretches taken out of it together, L tokens of the longest of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

ROOT = -1  # in place of the root that a branch goes on from
PREFIX = -2  # the same for a branch that goes on from the prefix
# Stretches of at most this many tokens are taken together: one larger call beats several small ones. Longer ones are
# taken alone: no padding is computed, and nothing is copied.
_SHORT = 64


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Stretches of a row, each a run of tokens: how they are taken out of the row and put back.

    One stretch alone is a slice. Several are gathered, and padding repeats a stretch's last token.
    """

    starts: tuple[int, ...]  # [B]
    lengths: tuple[int, ...]  # [B]
    positions: Tensor  # [B, L] int64 in the row; empty for one stretch
    real: Tensor  # [B * L without padding] int64: which of `positions` are not padding; empty where all are

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int]) -> "Stretches":
        """The stretches of `lengths` tokens that begin at `starts`."""
        start, length = np.asarray(starts), np.asarray(lengths)
        column = np.arange(length.max())
        positions = start[:, None] + np.minimum(column, length[:, None] - 1)
        real = np.flatnonzero(column < length[:, None])
        nothing = np.zeros(0, dtype=np.int64)
        return Stretches(
            starts=tuple(start.tolist()),
            lengths=tuple(length.tolist()),
            positions=torch.from_numpy(positions if len(start) > 1 else nothing),
            real=torch.from_numpy(real if len(real) < positions.size else nothing),
        )

    def take(self, row: Tensor) -> Tensor:
        """Tokens of a row [S, ...] as [B, L, ...]."""
        if len(self.starts) == 1:
            return row.narrow(0, self.starts[0], self.lengths[0]).unsqueeze(0)
        return row.index_select(0, self.positions.flatten()).unflatten(0, self.positions.shape)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Write values [B, L, ...] to their places in a row [S, ...]; those of padding are dropped."""
        if len(self.starts) == 1:
            self.take(row).copy_(values)
        else:
            row.index_copy_(0, self._places, self.kept(values))

    def add(self, row: Tensor, values: Tensor) -> None:
        """Add values [B, L, ...] at their places in a row [S, ...]; those of padding are dropped."""
        if len(self.starts) == 1:
            self.take(row).add_(values)
        else:
            row.index_add_(0, self._places, self.kept(values))  # every place comes once: no order of additions

    @cached_property
    def padding(self) -> Tensor | None:
        """Which of the tokens are padding, [B, L]; None where none is. Made once, on use."""
        if not len(self.real):
            return None
        padding = torch.ones(self.positions.numel(), dtype=torch.bool, device=self.positions.device)
        return padding.index_fill_(0, self.real, False).view(self.positions.shape)

    @cached_property
    def _places(self) -> Tensor:
        """Where the tokens without padding are in the row."""
        return self.kept(self.positions)

    def kept(self, values: Tensor) -> Tensor:
        """Values [B, L, ...] one after the other, [tokens, ...], without those of padding."""
        flat = values.flatten(0, 1)
        return flat.index_select(0, self.real) if len(self.real) else flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Stretches of a row one after the other, without padding, for kernels of sequences of unequal length.

    Stretches that follow each other in the row are a slice of it. Others are gathered.
    """

    start: int  # of the slice
    num_tokens: int
    positions: Tensor  # [num_tokens] int64 in the row; empty for a slice
    ends: Tensor  # [B + 1] int32: 0, and where each stretch ends among the tokens taken
    longest: int

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int]) -> "Runs":
        """The stretches of `lengths` tokens that begin at `starts`."""
        start, length = np.asarray(starts), np.asarray(lengths)
        ends = np.cumsum(length)
        before = ends - length
        is_slice = bool((start - before == start[0]).all())
        positions = np.zeros(0, np.int64) if is_slice else np.arange(ends[-1]) + np.repeat(start - before, length)
        return Runs(
            start=int(start[0]),
            num_tokens=int(ends[-1]),
            positions=torch.from_numpy(positions),
            ends=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            longest=int(length.max()),
        )

    def take(self, row: Tensor) -> Tensor:
        """Tokens of a row [S, ...] as [num_tokens, ...]."""
        if len(self.positions):
            return row.index_select(0, self.positions)
        return row.narrow(0, self.start, self.num_tokens)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Write values [num_tokens, ...] to their places in a row [S, ...]."""
        if len(self.positions):
            row.index_copy_(0, self.positions, values)
        else:
            self.take(row).copy_(values)

    def add(self, row: Tensor, values: Tensor) -> None:
        """Add values [num_tokens, ...] at their places in a row [S, ...]."""
        if len(self.positions):
            row.index_add_(0, self.positions, values)  # every place comes once: no order of additions
        else:
            self.take(row).add_(values)

    def kept(self, values: Tensor) -> Tensor:
        """Values [num_tokens, ...] one after the other, which they are."""
        return values


Places = TypeVar("Places", Stretches, Runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootBlock(Generic[Places]):
    """Roots, and the branches of each as one stretch that sees all of the root."""

    branches: Places
    roots: Places  # as many
    of_prefix: bool  # the root is the prefix, and `roots` are its tokens; else they are in the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Generic[Places]):
    """The two parts of attention over segments.

    Every token is in one stretch of `own`, whose tokens see those up to themselves. Tokens of branches also see their
    root by `shared`, and each is in one block of it at most.
    """

    own: tuple[Places, ...]
    shared: tuple[RootBlock[Places], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of a row, and attention over them: in blocks, and for kernels of sequences of unequal length."""

    lengths: tuple[int, ...]  # of each segment
    roots: tuple[int, ...]  # for each segment the number of the one that it goes on from, or ROOT, or PREFIX
    prefix_tokens: int
    blocks: Parts[Stretches]  # of segments of similar size
    runs: Parts[Runs]  # all segments together, all roots of the row together, the prefix

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.runs.own[0].ends.device

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, S."""
        return sum(self.lengths)

    @cached_property
    def root_lengths(self) -> tuple[int, ...]:
        """For each segment the tokens of its root, 0 for a root."""
        outside = {ROOT: 0, PREFIX: self.prefix_tokens}
        return tuple(outside[root] if root in outside else self.lengths[root] for root in self.roots)

    @cached_property
    def longest_path(self) -> int:
        """Most tokens that one token sees."""
        return max(map(sum, zip(self.lengths, self.root_lengths, strict=True)))


def lay_out(lengths: Sequence[int], roots: Sequence[int], *, prefix_tokens: int = 0) -> Segments:
    """Segments that follow each other in a row.

    Padding exists in attention only, and only among short segments.

    Args:
        lengths: tokens of each segment, at least 1.
        roots: for each segment the number of the one that it goes on from, or ROOT, or PREFIX. The branches of one
            root follow each other, in front of or behind it.
        prefix_tokens: of the prompt that branches of PREFIX go on from; its keys and values are given to attention.
    """
    starts = (np.cumsum(lengths) - lengths).tolist()
    branches: dict[int, list[int]] = {}  # root -> start and length of its branches together
    for root, run in groupby(range(len(lengths)), key=lambda n: roots[n]):
        if root == ROOT:
            continue
        assert root not in branches, "branches of one root follow each other"
        numbers = list(run)
        branches[root] = [starts[numbers[0]], sum(lengths[n] for n in numbers)]
    assert (PREFIX in branches) == (prefix_tokens > 0), "branches of the prefix and its length come together"
    of_prefix = branches.pop(PREFIX, None)
    spans = [(starts[root], lengths[root], *branches[root]) for root in branches]
    return Segments(
        lengths=tuple(lengths),
        roots=tuple(roots),
        prefix_tokens=prefix_tokens,
        blocks=Parts(
            own=tuple(
                Stretches.of([starts[n] for n in block], [lengths[n] for n in block])
                for block in _alike([(length,) for length in lengths])
            ),
            shared=_shared(
                Stretches.of,
                [[spans[n] for n in block] for block in _alike([(span[3], span[1]) for span in spans])],
                of_prefix,
                prefix_tokens,
            ),
        ),
        runs=Parts(
            own=(Runs.of(starts, lengths),),
            shared=_shared(Runs.of, [spans] if spans else [], of_prefix, prefix_tokens),
        ),
    )


_Span = tuple[int, int, int, int]  # start and length of a root, and of its branches together


def _shared(
    of: Callable[[Sequence[int], Sequence[int]], Places],
    blocks: Sequence[Sequence[_Span]],
    of_prefix: Sequence[int] | None,
    prefix_tokens: int,
) -> tuple[RootBlock[Places], ...]:
    """Blocks of roots with their branches, and before them the branches of the prefix, by their start and length."""
    shared = []
    if of_prefix is not None:
        start, length = of_prefix
        shared.append(RootBlock(branches=of([start], [length]), roots=of([0], [prefix_tokens]), of_prefix=True))
    for block in blocks:
        root_starts, root_lengths, branch_starts, branch_lengths = zip(*block, strict=True)
        shared.append(
            RootBlock(branches=of(branch_starts, branch_lengths), roots=of(root_starts, root_lengths), of_prefix=False)
        )
    return tuple(shared)


def _alike(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Numbers of what is computed together: what is short by itself in blocks, and everything else alone."""
    short = [n for n, size in enumerate(sizes) if max(size) <= _SHORT]
    return ([short] if short else []) + [[n] for n, size in enumerate(sizes) if max(size) > _SHORT]
