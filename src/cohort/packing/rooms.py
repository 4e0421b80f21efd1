"""First-fit: bins and the room that each of them has left."""

from collections.abc import Sequence

Rows = tuple[int, ...]  # sequence numbers


class Rooms:
    """What the bins have left, in a tree of maxima: the first bin with enough room is found in log(bins) steps."""

    def __init__(self, max_bins: int) -> None:
        self._num_leaves = 1 << max(max_bins - 1, 0).bit_length()
        self._tree = [-1] * (2 * self._num_leaves)  # node i has children 2i and 2i + 1; -1: not a bin yet

    @property
    def most(self) -> int:
        """Room of the bin that has most of it."""
        return self._tree[1]

    def of(self, number: int) -> int:
        """Room of one bin."""
        return self._tree[self._num_leaves + number]

    def first(self, size: int) -> int | None:
        """The first bin with that much room."""
        tree, node = self._tree, 1
        if tree[1] < size:
            return None
        while node < self._num_leaves:
            node *= 2
            node += tree[node] < size
        return node - self._num_leaves

    def put(self, number: int, room: int) -> None:
        """Change the room of one bin."""
        tree, node = self._tree, self._num_leaves + number
        tree[node] = room
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            most = left if left > right else right
            if tree[node] == most:
                break
            tree[node] = most


def split_group(rows: Sequence[int], sizes: Sequence[int], room: int) -> tuple[Rows, ...]:
    """Sequences of one group to parts of at most `room` tokens after the prompt, by first-fit decreasing.

    Args:
        rows: sequence numbers.
        sizes: tokens after the prompt, by sequence number.
        room: what the budget leaves beside the prompt. A completion that is longer is a part of its own.
    """
    parts: list[list[int]] = []
    rooms = Rooms(len(rows))
    for n in sorted(rows, key=lambda n: -sizes[n]):
        number = rooms.first(sizes[n])
        if number is None:
            number = len(parts)
            parts.append([])
            rooms.put(number, room - sizes[n])
        else:
            rooms.put(number, rooms.of(number) - sizes[n])
        parts[number].append(n)
    return tuple(map(tuple, parts))
