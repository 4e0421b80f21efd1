"""Which tokens of a packed row attend to which.

A row holds segments one after the other, without padding. A root segment is a sequence of its own: its tokens see the
tokens before them in it. A branch segment goes on from a root: its tokens see all of the root, and those before them in
the branch. All branches of a root follow each other. A root can also be a prefix that is not in the row, of which
attention is given keys and values. Nothing else of a model looks at other tokens, so that only attention has to know.

S tokens of a row, B stretches taken out of it together, L tokens of the longest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

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
            row.index_copy_(0, self._places, self._kept(values))

    def add(self, row: Tensor, values: Tensor) -> None:
        """Add values [B, L, ...] at their places in a row [S, ...]; those of padding are dropped."""
        if len(self.starts) == 1:
            self.take(row).add_(values)
        else:
            row.index_add_(0, self._places, self._kept(values))  # every place comes once: no order of additions

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
        return self._kept(self.positions)

    def _kept(self, values: Tensor) -> Tensor:
        """Values [B, L, ...] without those of padding."""
        flat = values.flatten(0, 1)
        return flat.index_select(0, self.real) if len(self.real) else flat

    def to(self, device: torch.device) -> "Stretches":
        """The same on `device`."""
        return Stretches(
            starts=self.starts,
            lengths=self.lengths,
            positions=self.positions.to(device, non_blocking=True),
            real=self.real.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RootBlock:
    """Roots of similar size, and the branches of each as one stretch that sees all of the root."""

    branches: Stretches
    roots: Stretches | None  # as many; None: the prefix

    def to(self, device: torch.device) -> "RootBlock":
        """The same on `device`."""
        roots = None if self.roots is None else self.roots.to(device)
        return RootBlock(branches=self.branches.to(device), roots=roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Every segment with its root in front of it: what its last token sees. K keys over all segments."""

    keys: Tensor | None  # [K] int64, positions in prefix and row together; None: those of the row as it is
    query_ends: Tensor  # [segments + 1] int32: 0, and where each segment's queries end
    key_ends: Tensor  # [segments + 1] int32: 0, and where each segment's keys end
    max_queries: int
    max_keys: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of a row, and the two parts of attention over them.

    Every token is in one stretch of `own`, whose tokens see those up to themselves. Tokens of branches also see their
    root by `shared`.
    """

    lengths: tuple[int, ...]  # of each segment
    roots: tuple[int, ...]  # for each segment the number of the one that it goes on from, or ROOT, or PREFIX
    prefix_tokens: int
    own: tuple[Stretches, ...]
    shared: tuple[RootBlock, ...]
    device: torch.device

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

    @cached_property
    def paths(self) -> Paths:
        """Each segment after a copy of its root, for kernels of whole sequences. Made once, on use."""
        lengths, root_lengths = np.asarray(self.lengths), np.asarray(self.root_lengths)
        spans = lengths + root_lengths
        keys = None
        if root_lengths.any():
            starts = self.prefix_tokens + np.cumsum(lengths) - lengths
            roots = np.asarray(self.roots)
            within = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
            of_root = np.repeat(np.where(roots >= 0, starts[roots], 0), spans)
            of_own = np.repeat(starts - root_lengths, spans)
            keys = within + np.where(within < np.repeat(root_lengths, spans), of_root, of_own)

        def ends(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([[0], x]).astype(np.int32)).to(self.device, non_blocking=True)

        return Paths(
            keys=None if keys is None else torch.from_numpy(keys).to(self.device, non_blocking=True),
            query_ends=ends(np.cumsum(lengths)),
            key_ends=ends(np.cumsum(spans)),
            max_queries=max(self.lengths),
            max_keys=self.longest_path,
        )

    def to(self, device: torch.device) -> "Segments":
        """The same on `device`."""
        return Segments(
            lengths=self.lengths,
            roots=self.roots,
            prefix_tokens=self.prefix_tokens,
            own=tuple(stretches.to(device) for stretches in self.own),
            shared=tuple(block.to(device) for block in self.shared),
            device=device,
        )


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
    shared = []
    if PREFIX in branches:
        start, length = branches.pop(PREFIX)
        shared.append(RootBlock(branches=Stretches.of([start], [length]), roots=None))
    for block in _alike([(branches[root][1], lengths[root]) for root in branches]):
        mine = [list(branches)[n] for n in block]
        shared.append(
            RootBlock(
                branches=Stretches.of([branches[root][0] for root in mine], [branches[root][1] for root in mine]),
                roots=Stretches.of([starts[root] for root in mine], [lengths[root] for root in mine]),
            )
        )
    return Segments(
        lengths=tuple(lengths),
        roots=tuple(roots),
        prefix_tokens=prefix_tokens,
        own=tuple(
            Stretches.of([starts[n] for n in block], [lengths[n] for n in block])
            for block in _alike([(length,) for length in lengths])
        ),
        shared=tuple(shared),
        device=torch.device("cpu"),
    )


def _alike(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Numbers of what is computed together: what is short by itself in blocks, and everything else alone."""
    short = [n for n, size in enumerate(sizes) if max(size) <= _SHORT]
    return ([short] if short else []) + [[n] for n, size in enumerate(sizes) if max(size) > _SHORT]
