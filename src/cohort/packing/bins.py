"""Sequences to micro-batches under a hard token budget, and micro-batches to ranks.

In this order: no micro-batch is over the budget, the most loaded rank is as little loaded as can be, few prompts are
computed more than once, there are few micro-batches.

1. Groups go to ranks, those with the longest sequences first, each to the least loaded rank; a group is divided over
   ranks only where that lowers the load of the most loaded one.
2. Each rank fills its micro-batches by first-fit decreasing: for whole sequences at most 11/9 of the fewest + 1. Where
   ranks would then wait for each other, each spreads its work evenly over as many micro-batches, if the budget allows.
3. A rank's micro-batches are run in the order of decreasing cost, so those that ranks run at the same time are alike.

A group that is larger than the budget becomes a stream where its prompt is long: the prompt is computed once, and the
completions in parts that go on from it. Prompt and part together are under the budget.

Models that pad get rows of like length: sorted over all ranks and cut into micro-batches of like cost.

N sequences. Without shared prompts each sequence is a group of its own, without a prompt.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from cohort.records import IntArray

# How much more than its share of the work each may have before a group is divided. Less than 1 % is not worth a prompt
# that is computed again. Where that is too tight for what cannot be divided, more slack ends up more even.
_TOLERANCES = (1.01, 1.03)

Rows = tuple[int, ...]  # sequence numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Which sequences each rank computes together."""

    per_rank: tuple[tuple[Rows, ...], ...]  # [rank][micro-batch] -> its sequences; () is nothing to do
    streams_per_rank: tuple[tuple[tuple[Rows, ...], ...], ...]  # [rank][stream][part] -> some of one group's sequences
    num_over_budget: int  # sequences longer than the budget by themselves; each is alone in its micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What computing costs, in units of one token of a sequence so short that its attention costs nothing.

    Per layer of hidden size H, the matrices take about 24 H^2 FLOPs a token, and attention 4 H for each earlier token
    that it looks at. A token at position S therefore costs 1 + S / (6 H).
    """

    quadratic: float = 1 / (6 * 2048)  # 1 / (6 H)
    micro_batch: float = 512.0  # starting one more micro-batch takes as long as this many tokens


_DEFAULT_COST = CostModel()
_Batch = tuple[float, Rows]  # cost and sequence numbers of a micro-batch
_Share = dict[int, list[int]]  # group -> those of its sequences that are computed in one place, longest first


def fill_bins(
    prompt_tokens: IntArray,
    completion_tokens: IntArray,
    groups: Sequence[int],
    *,
    num_rows: IntArray | None = None,
    budget: int,
    world_size: int,
    share_prompts: bool,
    padded: bool,
    cost: CostModel = _DEFAULT_COST,
) -> Bins:
    """Put each sequence into one micro-batch, or part of a stream, of one rank.

    All ranks get the same number of micro-batches; streams come besides.

    Args:
        prompt_tokens: [N] of each sequence; the same throughout a group.
        completion_tokens: [N] input tokens after the prompt; 0 for a completion of one token.
        groups: [N] sequences with the same number share their prompt.
        num_rows: [N] rows of each, for models that pad; one by default. Those of several are as long as the longest.
        budget: most tokens of a micro-batch. Only a sequence that is longer by itself is over it, and alone.
        world_size: number of ranks.
        share_prompts: a prompt is computed, and counted, once per group and micro-batch.
        padded: a micro-batch is counted as rows times longest row, as the model cannot compute packed rows. Excludes
            `share_prompts`.
        cost: weighs a token's attention against the rest of its work.
    """
    assert not (padded and share_prompts)
    lengths = prompt_tokens + completion_tokens
    if padded:
        num_rows = np.ones_like(lengths) if num_rows is None else num_rows
        ranks = _fill_padded(lengths, num_rows, budget, world_size, cost)
        lengths = lengths * num_rows
        streams: list[list[tuple[Rows, ...]]] = [[] for _ in range(world_size)]
    else:
        if not share_prompts:  # then a prompt is like the beginning of its completion
            prompt_tokens, completion_tokens, groups = np.zeros_like(lengths), lengths, range(len(lengths))
        work = _Work(prompt_tokens, completion_tokens, groups, cost)
        shares = _spread(work, work.members, world_size)
        streams = [_take_streams(work, share, budget, cost) for share in shares]
        ranks = _fill_packed(work, shares, budget, cost)
    return Bins(
        per_rank=tuple(tuple(rows for _, rows in batches) for batches in ranks),
        streams_per_rank=tuple(map(tuple, streams)),
        num_over_budget=int((lengths > budget).sum()),
    )


class _Work:
    """Sequences by group, and what each adds to a micro-batch.

    A group's prompt counts once in each micro-batch that has any of its sequences.
    """

    def __init__(
        self, prompt_tokens: IntArray, completion_tokens: IntArray, groups: Sequence[int], cost: CostModel
    ) -> None:
        prompt_costs = prompt_tokens * (1 + cost.quadratic * prompt_tokens / 2)
        costs = completion_tokens * (1 + cost.quadratic * (prompt_tokens + completion_tokens / 2))
        self.sizes: list[int] = completion_tokens.tolist()  # [N] tokens
        self.costs: list[float] = costs.tolist()  # [N]
        by_group: dict[int, list[int]] = {}
        for n in np.argsort(-completion_tokens, kind="stable").tolist():
            by_group.setdefault(groups[n], []).append(n)
        # Groups are numbered by size alone, so that the order of the input does not matter.
        prompts: list[int] = prompt_tokens.tolist()
        order = sorted(by_group.values(), key=lambda rows: (prompts[rows[0]], [self.sizes[n] for n in rows]))
        firsts = [rows[0] for rows in order]
        self.members: _Share = dict(enumerate(order))
        self.prompt_sizes: list[int] = prompt_tokens[firsts].tolist()  # [group] tokens
        self.prompt_costs: list[float] = prompt_costs[firsts].tolist()  # [group]

    def size(self, group: int, rows: Iterable[int]) -> int:
        """Tokens of some sequences of a group and their prompt."""
        return self.prompt_sizes[group] + sum(map(self.sizes.__getitem__, rows))

    def cost(self, group: int, rows: Iterable[int]) -> float:
        """Cost of some sequences of a group and their prompt."""
        return self.prompt_costs[group] + sum(map(self.costs.__getitem__, rows))


def _take_streams(work: _Work, share: _Share, budget: int, cost: CostModel) -> list[tuple[Rows, ...]]:
    """Take out of a rank's share the groups that are worth a stream; their parts, largest first."""
    streams = []
    for g, rows in list(share.items()):
        if len(rows) == 1 or work.size(g, rows) <= budget:
            continue
        parts = _split_group(rows, work.sizes, budget - work.prompt_sizes[g])
        # a stream is one short pass more, and leaves out the prompt of every part but one
        if work.prompt_costs[g] * (len(parts) - 1) > cost.micro_batch:
            streams.append((work.cost(g, rows), parts))
            del share[g]
    return [parts for _, parts in sorted(streams, key=lambda stream: -stream[0])]


def _split_group(rows: Sequence[int], sizes: Sequence[int], room: int) -> tuple[Rows, ...]:
    """Divide a group's sequences, longest first, into parts of at most `room` tokens after the prompt, by first-fit.

    A completion that is longer is a part of its own.
    """
    parts: list[list[int]] = []
    rooms = np.zeros(len(rows), dtype=np.int64)
    for n in rows:
        number = _first_with(rooms[: len(parts)], sizes[n])
        if number is None:
            number = len(parts)
            parts.append([])
            rooms[number] = room
        rooms[number] -= sizes[n]
        parts[number].append(n)
    return tuple(map(tuple, parts))


def _fill_packed(work: _Work, shares: Sequence[_Share], budget: int, cost: CostModel) -> list[list[_Batch]]:
    """The fastest of three ways to fill the micro-batches of each rank with its share.

    Whole groups compute the fewest tokens, divided groups need the fewest micro-batches, and even micro-batches keep
    ranks from waiting for each other.
    """

    def duration(ranks: list[list[_Batch]]) -> float:
        return _duration(ranks, cost)

    best = _in_step([_first_fit(work, share, budget, divide=False) for share in shares])
    if len(work.members) < len(work.sizes):
        divided = _in_step([_first_fit(work, share, budget, divide=True) for share in shares])
        best = min(best, divided, key=duration)
    busy = sum(c for batches in best for c, _ in batches) / len(shares) + cost.micro_batch * len(best[0])
    if duration(best) > _TOLERANCES[0] * busy:
        even = [_even(work, share, len(b), budget) or b for share, b in zip(shares, best, strict=True)]
        best = min(best, even, key=duration)
    return best


def _divide(rows: Sequence[int], amounts: Sequence[float], room: float) -> tuple[list[int], list[int]]:
    """Sequences that fit into the room together, the largest that still fits first, and the others. One at least."""
    taken, left, i = [], list(rows), 0
    while (i := bisect_left(left, -room, i, key=lambda n: -amounts[n])) < len(left):
        room -= amounts[left[i]]
        taken.append(left.pop(i))
    return (taken, left) if taken else (left[:1], left[1:])


def _spread(work: _Work, share: _Share, num_parts: int) -> list[_Share]:
    """Divide work into parts of about the same cost."""
    if num_parts == 1:
        return [dict(share)]
    mean = sum(work.cost(g, rows) for g, rows in share.items()) / num_parts
    heaviest, best = _spread_within(work, share, num_parts, _TOLERANCES[0] * mean)
    if heaviest > _TOLERANCES[0] * mean:
        other_heaviest, other = _spread_within(work, share, num_parts, _TOLERANCES[1] * mean)
        best = other if other_heaviest < heaviest else best
    return best


def _spread_within(work: _Work, share: _Share, num_parts: int, limit: float) -> tuple[float, list[_Share]]:
    """Longest processing time first. The cost of the most expensive part, and the parts.

    Groups with the longest sequences come first, as those cannot be divided. A group goes to the least loaded part; if
    that would then be the most loaded one and over the limit, only as much of the group as it can take.
    """
    queue = [(-work.costs[rows[0]], g, rows) for g, rows in share.items()]
    heapq.heapify(queue)
    loads = [(0.0, part) for part in range(num_parts)]
    parts: list[_Share] = [{} for _ in range(num_parts)]
    while queue:
        _, g, rows = heapq.heappop(queue)
        load, number = loads[0]
        part = parts[number]
        if g not in part:
            load += work.prompt_costs[g]
        added = sum(map(work.costs.__getitem__, rows))
        if load + added > limit:
            rows, left = _divide(rows, work.costs, limit - load)
            if left:
                heapq.heappush(queue, (-work.costs[left[0]], g, left))
                limit += work.prompt_costs[g] / num_parts
                added = sum(map(work.costs.__getitem__, rows))
        part[g] = sorted(part[g] + rows, key=lambda n: -work.costs[n]) if g in part else rows
        heapq.heapreplace(loads, (load + added, number))
        limit = max(limit, load + added)
    return max(loads)[0], parts


def _first_fit(work: _Work, share: _Share, budget: int, *, divide: bool) -> list[_Batch]:
    """One rank's micro-batches by first-fit decreasing, most expensive first.

    A group that is larger than the budget is divided; with `divide` also one that is larger than what any micro-batch
    has left.
    """
    queue = [(-work.size(g, rows), g, rows) for g, rows in share.items()]
    heapq.heapify(queue)
    rooms = np.zeros(sum(map(len, share.values())), dtype=np.int64)  # of the micro-batches, in their order
    members: list[list[int]] = []
    costs: list[float] = []
    while queue:
        negative_size, g, rows = heapq.heappop(queue)
        size = -negative_size
        begun = rooms[: len(members)]
        number = _first_with(begun, size)
        if number is None and divide and len(begun) and work.size(g, rows[-1:]) <= begun.max():
            number = int(begun.argmax())
        if number is None:
            number = len(members)
            members.append([])
            costs.append(0.0)
            rooms[number] = budget
        room = int(rooms[number])
        if size > room:
            rows, left = _divide(rows, work.sizes, room - work.prompt_sizes[g])
            if left:
                taken = work.size(g, rows)
                heapq.heappush(queue, (taken - size - work.prompt_sizes[g], g, left))
                size = taken
        members[number].extend(rows)
        costs[number] += work.cost(g, rows)
        rooms[number] = room - size
    return _by_cost((c, tuple(rows)) for c, rows in zip(costs, members, strict=True))


def _first_with(rooms: IntArray, size: int) -> int | None:
    """The number of the first bin that has room for `size` tokens."""
    fits = rooms >= size
    return int(fits.argmax()) if fits.any() else None


def _even(work: _Work, share: _Share, num_batches: int, budget: int) -> list[_Batch] | None:
    """One rank's micro-batches of about the same cost, unless the budget forbids."""
    batches = []
    for part in _spread(work, share, num_batches):
        rows = tuple(n for rows in part.values() for n in rows)
        if len(rows) > 1 and sum(work.size(g, rows) for g, rows in part.items()) > budget:
            return None
        batches.append((sum(work.cost(g, rows) for g, rows in part.items()), rows))
    return _by_cost(batches)


def _by_cost(batches: Iterable[_Batch]) -> list[_Batch]:
    """Most expensive first: what runs out of memory does so early, and ranks do alike work at the same time."""
    return sorted(batches, key=lambda batch: -batch[0])


def _fill_padded(
    lengths: IntArray, num_rows: IntArray, budget: int, world_size: int, cost: CostModel
) -> list[list[_Batch]]:
    """Micro-batches of rows of like length: the fewest, or more as long as less padding makes it faster."""
    order = np.argsort(-lengths, kind="stable").tolist()
    rows = [(int(lengths[n]), float(lengths[n] * (1 + cost.quadratic * lengths[n] / 2))) for n in order]
    before = [0, *np.cumsum(num_rows[order]).tolist()]
    fewest = -(-len(_cut(rows, before, budget, inf)) // world_size) * world_size
    best = _deal([], world_size)
    for num_batches in range(fewest, len(rows) + world_size, world_size):
        cuts = _cut_evenly(rows, before, budget, num_batches)
        batches = [((before[end] - before[start]) * rows[start][1], tuple(order[start:end])) for start, end in cuts]
        ranks = _deal(batches, world_size)
        if num_batches > fewest and _duration(ranks, cost) >= _duration(best, cost):
            break
        best = ranks
    return best


def _cut_evenly(
    rows: Sequence[tuple[int, float]], before: Sequence[int], budget: int, num_batches: int
) -> list[tuple[int, int]]:
    """`_cut` to no more than that many micro-batches, by the lowest limit to their cost."""
    low, high = 0.0, before[-1] * max((cost for _, cost in rows), default=0.0)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if len(_cut(rows, before, budget, middle)) <= num_batches:
            high = middle
        else:
            low = middle
    return _cut(rows, before, budget, high)


def _cut(
    rows: Sequence[tuple[int, float]], before: Sequence[int], budget: int, most_cost: float
) -> list[tuple[int, int]]:
    """Cut consecutive entries into the fewest micro-batches: first entry and end of each.

    Args:
        rows: length and cost of one row of each entry, by decreasing length.
        before: number of rows before each entry, and of all rows.
        budget: most positions of a micro-batch.
        most_cost: of a micro-batch.
    """
    cuts, start = [], 0
    while start < len(rows):
        length, cost = rows[start]
        most_rows = int(min(budget // length, most_cost / cost))
        end = max(start + 1, bisect_right(before, before[start] + most_rows) - 1)
        cuts.append((start, end))
        start = end
    return cuts


def _deal(batches: Sequence[_Batch], world_size: int) -> list[list[_Batch]]:
    """Most expensive micro-batch first to the least loaded of the ranks that have room for one more."""
    most = -(-len(batches) // world_size)
    ranks: list[list[_Batch]] = [[] for _ in range(world_size)]
    loads = [(0.0, rank) for rank in range(world_size)]
    for batch in _by_cost(batches):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(batch)
        if len(ranks[rank]) < most:
            heapq.heappush(loads, (load + batch[0], rank))
    return _in_step(ranks)


def _in_step(ranks: list[list[_Batch]]) -> list[list[_Batch]]:
    """The same number of micro-batches on all ranks."""
    most = max(map(len, ranks))
    return [batches + [(0.0, ())] * (most - len(batches)) for batches in ranks]


def _duration(ranks: list[list[_Batch]], cost: CostModel) -> float:
    """Cost of a step whose ranks wait for each other after every micro-batch."""
    return sum(cost.micro_batch + max(c for c, _ in batches) for batches in zip(*ranks, strict=True))
