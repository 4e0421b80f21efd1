"""Pack sequences into micro-batches under a hard token budget and assign them to ranks.

Priorities: no micro-batch exceeds the budget unless a single sequence does; ranks have equal loads; few prompts are
computed more than once; few micro-batches.

1. Groups are assigned to ranks, those with the longest sequences first, each to the least loaded rank. A group is split
   over ranks only if that lowers the load of the most loaded rank.
2. Each rank fills its micro-batches by first-fit decreasing: for whole sequences at most 11/9 of the minimum + 1. If
   ranks would then wait for each other, each spreads its sequences evenly over as many micro-batches, if the budget
   allows.
3. Each rank runs its micro-batches by decreasing cost, so that ranks run similar ones at the same time.

A group that exceeds the budget becomes a split group if its prompt is long: the prompt is computed once, and its
completions in several parts that continue it. Prompt and part together are within the budget.

For models that need padding, rows of similar length are put together: sorted over all ranks, and cut into micro-batches
of similar cost.

N items: sequences, or trajectories that are kept whole. Without shared prompts each item is a group of its own, without
a prompt.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from cohort.records import IntArray

# Maximum load relative to the mean before a group is split. An imbalance below 1 % does not justify computing a prompt
# again. If sequences are too long to stay within 1 %, the second tolerance may give a better balance.
_TOLERANCES = (1.01, 1.03)

Indices = tuple[int, ...]  # indices of sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Sequences of each micro-batch of each rank."""

    micro_batches: tuple[tuple[Indices, ...], ...]  # [rank][micro-batch] -> its sequences; may be empty
    split_groups: tuple[tuple[tuple[Indices, ...], ...], ...]  # [rank][group][part] -> some sequences of the group
    num_over_budget: int  # sequences, or trajectories kept whole, that exceed it; each has its own micro-batch


# Costs are in units of one token without attention. In a layer of hidden size H, a token takes about 24 H^2 FLOPs in
# linear layers, and 4 H in attention for each token it attends to. So a token at position S costs 1 + S / (6 H).
ATTENTION_COST = 1 / (6 * 2048)
_MICRO_BATCH_COST = 512.0  # overhead of a micro-batch

_MicroBatch = tuple[float, Indices]  # cost and sequences
_Share = dict[int, list[int]]  # group -> those of its sequences that are in the share, longest first


def assign_sequences(
    prompt_tokens: IntArray,
    completion_tokens: IntArray,
    groups: Sequence[int],
    *,
    num_rows: IntArray | None = None,
    budget: int,
    dp_size: int,
    share_prompts: bool,
    padded: bool,
) -> Assignment:
    """Assign each sequence to a micro-batch, or to a part of a split group, of one rank.

    All ranks get the same number of micro-batches, not counting split groups.

    Args:
        prompt_tokens: [N] prompt tokens of each sequence; the same throughout a group.
        completion_tokens: [N] input tokens after the prompt; 0 for a completion of one token.
        groups: [N] group of each sequence. Sequences of a group share their prompt.
        num_rows: [N] rows of each item, for models that need padding; 1 by default. The lengths of an item with several
            rows are those of its longest row.
        budget: maximum tokens of a micro-batch. Only a single sequence may exceed it.
        dp_size: data-parallel size: number of ranks with different sequences.
        share_prompts: compute and count a prompt once per group and micro-batch.
        padded: the tokens of a micro-batch are rows times longest row. Excludes `share_prompts`.
    """
    assert not (padded and share_prompts)
    lengths = prompt_tokens + completion_tokens
    if padded:
        num_rows = np.ones_like(lengths) if num_rows is None else num_rows
        ranks = _fill_padded(lengths, num_rows, budget, dp_size)
        lengths = lengths * num_rows
        split_groups: list[list[tuple[Indices, ...]]] = [[] for _ in range(dp_size)]
    else:
        if not share_prompts:  # the prompt counts as part of each completion
            prompt_tokens, completion_tokens, groups = np.zeros_like(lengths), lengths, range(len(lengths))
        by_group = _Groups(prompt_tokens, completion_tokens, groups)
        shares = _balance(by_group, by_group.members, dp_size)
        split_groups = [_take_split_groups(by_group, share, budget) for share in shares]
        ranks = _fill_packed(by_group, shares, budget)
    return Assignment(
        micro_batches=tuple(tuple(members for _, members in micro_batches) for micro_batches in ranks),
        split_groups=tuple(map(tuple, split_groups)),
        num_over_budget=int((lengths > budget).sum()),
    )


class _Groups:
    """Sequences by group, with their sizes and costs.

    A group's prompt counts once in each micro-batch that has any of its sequences.
    """

    def __init__(self, prompt_tokens: IntArray, completion_tokens: IntArray, groups: Sequence[int]) -> None:
        prompt_costs = prompt_tokens * (1 + ATTENTION_COST * prompt_tokens / 2)
        costs = completion_tokens * (1 + ATTENTION_COST * (prompt_tokens + completion_tokens / 2))
        self.sizes: list[int] = completion_tokens.tolist()  # [N] tokens
        self.costs: list[float] = costs.tolist()  # [N]
        by_group: dict[int, list[int]] = {}
        for n in np.argsort(-completion_tokens, kind="stable").tolist():
            by_group.setdefault(groups[n], []).append(n)
        # Number groups by size alone, so that the result does not depend on the order of the input.
        prompts: list[int] = prompt_tokens.tolist()
        order = sorted(by_group.values(), key=lambda indices: (prompts[indices[0]], [self.sizes[n] for n in indices]))
        firsts = [indices[0] for indices in order]
        self.members: _Share = dict(enumerate(order))
        self.prompt_sizes: list[int] = prompt_tokens[firsts].tolist()  # [group] tokens
        self.prompt_costs: list[float] = prompt_costs[firsts].tolist()  # [group]

    def size(self, group: int, indices: Iterable[int]) -> int:
        """Return the tokens of some sequences of a group, with their prompt."""
        return self.prompt_sizes[group] + sum(map(self.sizes.__getitem__, indices))

    def cost(self, group: int, indices: Iterable[int]) -> float:
        """Return the cost of some sequences of a group, with their prompt."""
        return self.prompt_costs[group] + sum(map(self.costs.__getitem__, indices))


def _take_split_groups(groups: _Groups, share: _Share, budget: int) -> list[tuple[Indices, ...]]:
    """Remove the groups worth splitting from a rank's share; return their parts, most expensive group first."""
    split = []
    for g, indices in list(share.items()):
        if len(indices) == 1 or groups.size(g, indices) <= budget:
            continue
        parts = _split_group(indices, groups.sizes, budget - groups.prompt_sizes[g])
        # splitting adds a pass for the prompt, and saves the prompt of every part but one
        if groups.prompt_costs[g] * (len(parts) - 1) > _MICRO_BATCH_COST:
            split.append((groups.cost(g, indices), parts))
            del share[g]
    return [parts for _, parts in sorted(split, key=lambda group: -group[0])]


def _split_group(indices: Sequence[int], sizes: Sequence[int], room: int) -> tuple[Indices, ...]:
    """Split a group's sequences, longest first, into parts of at most `room` tokens after the prompt, by first-fit.

    A longer completion gets its own part.
    """
    parts: list[list[int]] = []
    rooms = np.zeros(len(indices), dtype=np.int64)
    for n in indices:
        number = _first_with_room(rooms[: len(parts)], sizes[n])
        if number is None:
            number = len(parts)
            parts.append([])
            rooms[number] = room
        rooms[number] -= sizes[n]
        parts[number].append(n)
    return tuple(map(tuple, parts))


def _fill_packed(groups: _Groups, shares: Sequence[_Share], budget: int) -> list[list[_MicroBatch]]:
    """Fill the micro-batches of each rank in three ways, and return the fastest.

    Whole groups need the fewest tokens, divided groups the fewest micro-batches, and even micro-batches the least
    waiting between ranks.
    """
    best = _equalize_counts([_first_fit(groups, share, budget, divide=False) for share in shares])
    if len(groups.members) < len(groups.sizes):
        divided = _equalize_counts([_first_fit(groups, share, budget, divide=True) for share in shares])
        best = min(best, divided, key=_step_cost)
    busy = sum(c for batches in best for c, _ in batches) / len(shares) + _MICRO_BATCH_COST * len(best[0])
    if _step_cost(best) > _TOLERANCES[0] * busy:
        even = [_fill_evenly(groups, share, len(b), budget) or b for share, b in zip(shares, best, strict=True)]
        best = min(best, even, key=_step_cost)
    return best


def _take_fitting(indices: Sequence[int], amounts: Sequence[float], room: float) -> tuple[list[int], list[int]]:
    """Split sequences into those that fit into the room, taking the largest that fits first, and the rest.

    Takes at least one.
    """
    taken, left, i = [], list(indices), 0
    while (i := bisect_left(left, -room, i, key=lambda n: -amounts[n])) < len(left):
        room -= amounts[left[i]]
        taken.append(left.pop(i))
    return (taken, left) if taken else (left[:1], left[1:])


def _balance(groups: _Groups, share: _Share, num_parts: int) -> list[_Share]:
    """Split a share into parts of similar cost."""
    if num_parts == 1:
        return [dict(share)]
    mean = sum(groups.cost(g, indices) for g, indices in share.items()) / num_parts
    heaviest, best = _balance_within(groups, share, num_parts, _TOLERANCES[0] * mean)
    if heaviest > _TOLERANCES[0] * mean:
        other_heaviest, other = _balance_within(groups, share, num_parts, _TOLERANCES[1] * mean)
        best = other if other_heaviest < heaviest else best
    return best


def _balance_within(groups: _Groups, share: _Share, num_parts: int, limit: float) -> tuple[float, list[_Share]]:
    """Split a share by longest processing time first; return the cost of the most expensive part, and the parts.

    Groups with the longest sequences come first, because sequences cannot be split. A group goes to the least loaded
    part. If that would exceed the limit and all other parts, only as many of its sequences go there as fit.
    """
    queue = [(-groups.costs[indices[0]], g, indices) for g, indices in share.items()]
    heapq.heapify(queue)
    loads = [(0.0, part) for part in range(num_parts)]
    parts: list[_Share] = [{} for _ in range(num_parts)]
    while queue:
        _, g, indices = heapq.heappop(queue)
        load, number = loads[0]
        part = parts[number]
        if g not in part:
            load += groups.prompt_costs[g]
        added = sum(map(groups.costs.__getitem__, indices))
        if load + added > limit:
            indices, left = _take_fitting(indices, groups.costs, limit - load)
            if left:
                heapq.heappush(queue, (-groups.costs[left[0]], g, left))
                limit += groups.prompt_costs[g] / num_parts
                added = sum(map(groups.costs.__getitem__, indices))
        part[g] = sorted(part[g] + indices, key=lambda n: -groups.costs[n]) if g in part else indices
        heapq.heapreplace(loads, (load + added, number))
        limit = max(limit, load + added)
    return max(loads)[0], parts


def _first_fit(groups: _Groups, share: _Share, budget: int, *, divide: bool) -> list[_MicroBatch]:
    """Fill one rank's micro-batches by first-fit decreasing; most expensive first.

    A group that exceeds the budget is divided; with `divide`, also a group that exceeds the room left in every
    micro-batch.
    """
    queue = [(-groups.size(g, indices), g, indices) for g, indices in share.items()]
    heapq.heapify(queue)
    rooms = np.zeros(sum(map(len, share.values())), dtype=np.int64)  # tokens left in each micro-batch
    members: list[list[int]] = []
    costs: list[float] = []
    while queue:
        negative_size, g, indices = heapq.heappop(queue)
        size = -negative_size
        open_rooms = rooms[: len(members)]
        number = _first_with_room(open_rooms, size)
        if number is None and divide and len(open_rooms) and groups.size(g, indices[-1:]) <= open_rooms.max():
            number = int(open_rooms.argmax())
        if number is None:
            number = len(members)
            members.append([])
            costs.append(0.0)
            rooms[number] = budget
        room = int(rooms[number])
        if size > room:
            indices, left = _take_fitting(indices, groups.sizes, room - groups.prompt_sizes[g])
            if left:
                taken = groups.size(g, indices)
                heapq.heappush(queue, (taken - size - groups.prompt_sizes[g], g, left))
                size = taken
        members[number].extend(indices)
        costs[number] += groups.cost(g, indices)
        rooms[number] = room - size
    return _by_cost((c, tuple(indices)) for c, indices in zip(costs, members, strict=True))


def _first_with_room(rooms: IntArray, size: int) -> int | None:
    """Return the index of the first bin with room for `size` tokens, if any."""
    fits = rooms >= size
    return int(fits.argmax()) if fits.any() else None


def _fill_evenly(groups: _Groups, share: _Share, num_batches: int, budget: int) -> list[_MicroBatch] | None:
    """Fill one rank's micro-batches with similar costs; None if one would exceed the budget."""
    batches = []
    for part in _balance(groups, share, num_batches):
        batch = tuple(n for indices in part.values() for n in indices)
        if len(batch) > 1 and sum(groups.size(g, indices) for g, indices in part.items()) > budget:
            return None
        batches.append((sum(groups.cost(g, indices) for g, indices in part.items()), batch))
    return _by_cost(batches)


def _by_cost(batches: Iterable[_MicroBatch]) -> list[_MicroBatch]:
    """Sort by decreasing cost: out-of-memory shows early, and ranks run similar micro-batches at the same time."""
    return sorted(batches, key=lambda batch: -batch[0])


def _fill_padded(lengths: IntArray, num_rows: IntArray, budget: int, dp_size: int) -> list[list[_MicroBatch]]:
    """Fill padded micro-batches with rows of similar length: as few as possible, or more if less padding is faster."""
    order = np.argsort(-lengths, kind="stable").tolist()
    entries = [(int(lengths[n]), float(lengths[n] * (1 + ATTENTION_COST * lengths[n] / 2))) for n in order]
    before = [0, *np.cumsum(num_rows[order]).tolist()]
    fewest = -(-len(_cut(entries, before, budget, inf)) // dp_size) * dp_size
    best = _assign_to_ranks([], dp_size)
    for num_batches in range(fewest, len(entries) + dp_size, dp_size):
        cuts = _cut_evenly(entries, before, budget, num_batches)
        batches = [((before[end] - before[start]) * entries[start][1], tuple(order[start:end])) for start, end in cuts]
        ranks = _assign_to_ranks(batches, dp_size)
        if num_batches > fewest and _step_cost(ranks) >= _step_cost(best):
            break
        best = ranks
    return best


def _cut_evenly(
    entries: Sequence[tuple[int, float]], before: Sequence[int], budget: int, num_batches: int
) -> list[tuple[int, int]]:
    """`_cut` into at most `num_batches` micro-batches, with the lowest possible limit on their cost."""
    low, high = 0.0, before[-1] * max((cost for _, cost in entries), default=0.0)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if len(_cut(entries, before, budget, middle)) <= num_batches:
            high = middle
        else:
            low = middle
    return _cut(entries, before, budget, high)


def _cut(
    entries: Sequence[tuple[int, float]], before: Sequence[int], budget: int, max_cost: float
) -> list[tuple[int, int]]:
    """Cut consecutive entries into as few micro-batches as possible; return the start and end of each.

    Args:
        entries: length and cost of one row of each entry, by decreasing length.
        before: number of rows before each entry, and the total number of rows.
        budget: maximum positions of a micro-batch.
        max_cost: maximum cost of a micro-batch.
    """
    cuts, start = [], 0
    while start < len(entries):
        length, cost = entries[start]
        max_rows = int(min(budget // length, max_cost / cost))
        end = max(start + 1, bisect_right(before, before[start] + max_rows) - 1)
        cuts.append((start, end))
        start = end
    return cuts


def _assign_to_ranks(batches: Sequence[_MicroBatch], dp_size: int) -> list[list[_MicroBatch]]:
    """Assign micro-batches to ranks, the most expensive first, each to the least loaded rank, in equal numbers."""
    most = -(-len(batches) // dp_size)
    ranks: list[list[_MicroBatch]] = [[] for _ in range(dp_size)]
    loads = [(0.0, rank) for rank in range(dp_size)]
    for batch in _by_cost(batches):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(batch)
        if len(ranks[rank]) < most:
            heapq.heappush(loads, (load + batch[0], rank))
    return _equalize_counts(ranks)


def _equalize_counts(ranks: list[list[_MicroBatch]]) -> list[list[_MicroBatch]]:
    """Add empty micro-batches so that all ranks have the same number."""
    most = max(map(len, ranks))
    return [batches + [(0.0, ())] * (most - len(batches)) for batches in ranks]


def _step_cost(ranks: list[list[_MicroBatch]]) -> float:
    """Return the cost of a step in which ranks wait for each other after every micro-batch."""
    return sum(_MICRO_BATCH_COST + max(c for c, _ in batches) for batches in zip(*ranks, strict=True))
