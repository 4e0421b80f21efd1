"""Which tokens of a packed row attend to which.

A row holds segments one after the other, without padding. A root segment is a sequence of its own: its tokens see the
tokens before them in it. A branch segment goes on from a root: its tokens see all of the root, and those before them in
the branch. Nothing else of a model looks at other tokens, so that only attention has to know.

S tokens of a row, B segments of a block, L the longest of them, K the longest of their roots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

ROOT = -1  # in place of the root that a branch goes on from
# Segments of at most this many tokens are not told apart by length: one larger call beats several small ones.
_SHORT = 64


@dataclass(frozen=True, kw_only=True)
class SegmentBlock:
    """Segments of similar length, attended to in one call. Padding repeats a segment's last token."""

    queries: Tensor  # [B, L] int64, positions in the row
    keys: Tensor  # [B, K + L] int64, positions in the row: the root that a branch goes on from, then the queries
    root_lengths: Tensor  # [B], or [1] where all roots are of length K

    @cached_property
    def mask(self) -> Tensor | None:
        """Which keys a query sees, [B or 1, 1, L, K + L]; None where it is those up to itself. Made once, on use.

        Padded keys are masked where they stand before queries; those after them are hidden by causality.
        """
        length = self.queries.shape[1]
        num_root_keys = self.keys.shape[1] - length
        if num_root_keys == 0:
            return None
        device = self.queries.device
        in_root = torch.arange(num_root_keys, device=device) < self.root_lengths.unsqueeze(-1)
        before = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        rows = len(self.root_lengths)
        parts = [in_root.unsqueeze(1).expand(rows, length, -1), before.expand(rows, -1, -1)]
        return torch.cat(parts, dim=-1).unsqueeze(1)

    def to(self, device: torch.device) -> "SegmentBlock":
        """The same on `device`."""
        return SegmentBlock(
            queries=self.queries.to(device, non_blocking=True),
            keys=self.keys.to(device, non_blocking=True),
            root_lengths=self.root_lengths.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segments of a row as blocks. Every token of the row is a query of exactly one block."""

    blocks: tuple[SegmentBlock, ...]
    inverse: Tensor  # [S] int64: where each token is among all the blocks' B * L queries, block after block

    def to(self, device: torch.device) -> "Segments":
        """The same on `device`."""
        return Segments(
            blocks=tuple(block.to(device) for block in self.blocks), inverse=self.inverse.to(device, non_blocking=True)
        )


def lay_out(lengths: Sequence[int], roots: Sequence[int]) -> Segments:
    """Segments that follow each other in a row.

    Lengths within a block differ by less than a factor of two, short ones apart. So padding stays bounded whatever
    comes together in a row, and it exists in attention only.

    Args:
        lengths: tokens of each segment, at least 1.
        roots: for each segment the number of the one that it goes on from, or ROOT.
    """
    length, root = np.asarray(lengths), np.asarray(roots)
    start = np.cumsum(length) - length
    root_length = np.where(root == ROOT, 0, length[root])
    members: dict[tuple[int, int], list[int]] = {}
    for n, sizes in enumerate(zip(length, root_length, strict=True)):
        members.setdefault((_size_class(sizes[0]), _size_class(sizes[1])), []).append(n)
    inverse = np.empty(length.sum(), dtype=np.int64)
    blocks = []
    num_queries = 0
    for block in members.values():
        queries = _positions(start[block], length[block])
        keys = np.concatenate([_positions(start[root[block]], root_length[block]), queries], axis=1)
        real = np.arange(queries.shape[1]) < length[block][:, None]
        inverse[queries[real]] = num_queries + np.flatnonzero(real)
        num_queries += queries.size
        known = root_length[block] if np.ptp(root_length[block]) else root_length[block][:1]
        blocks.append(
            SegmentBlock(
                queries=torch.from_numpy(queries),
                keys=torch.from_numpy(keys),
                root_lengths=torch.from_numpy(known),
            )
        )
    return Segments(blocks=tuple(blocks), inverse=torch.from_numpy(inverse))


def _size_class(length: int) -> int:
    """0 for nothing, 1 for what is short, and one more at every power of two."""
    return 0 if length == 0 else max(1, int(length - 1).bit_length() - (_SHORT - 1).bit_length() + 1)


def _positions(start_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """Positions in the row of each segment's tokens, [B, longest]; the last is repeated."""
    return start_B[:, None] + np.minimum(np.arange(length_B.max()), length_B[:, None] - 1)
