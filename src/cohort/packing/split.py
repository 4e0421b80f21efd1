"""Assign the sequences of a step to ranks and micro-batches."""

from collections.abc import Sequence

import numpy as np

from cohort.batch import TrainBatch
from cohort.packing.bins import fill_bins
from cohort.records import TrainSequence


def pack(
    sequences: Sequence[TrainSequence],
    *,
    micro_batch_tokens: int,
    world_size: int = 1,
    share_prompts: bool,
    padded: bool,
    whole_trajectories: bool = True,
) -> tuple[TrainBatch, ...]:
    """Split a step's sequences over ranks, and over micro-batches of at most `micro_batch_tokens` positions.

    A sequence that is longer than the budget gets a micro-batch of its own. A group that is larger becomes a stream
    if that pays: its shared prefix is computed once, and its sequences in parts that are under the budget together with
    the prefix. The gradient of the step does not depend on the split: every token brings its own loss weight.

    Args:
        sequences: of the whole step, in any order.
        micro_batch_tokens: largest number of positions computed at a time.
        world_size: number of ranks.
        share_prompts: compute a group's shared prefix once per micro-batch or stream instead of once per sequence.
        padded: each sequence is a row as long as its micro-batch's longest, and padding counts.
        whole_trajectories: keep all sequences of a trajectory in one micro-batch, for losses that sum over a
            trajectory. One whose sequences are longer than the budget together gets a micro-batch of its own.

    Returns:
        One batch per rank, all with the same number of micro-batches; streams come besides.
    """
    units: dict[int, list[TrainSequence]] = {}  # sequences that are computed together
    for s in sequences:
        units.setdefault(s.trajectory if whole_trajectories else s.index, []).append(s)
    members = list(units.values())
    prefixes, sizes = np.zeros((2, len(members)), dtype=np.int64)
    groups = [-1] * len(members)
    for n, unit in enumerate(members):
        lengths = [len(s.token_ids) - 1 for s in unit]  # the last token of a sequence is not an input
        groups[n] = -1 - n
        if padded:
            sizes[n] = max(lengths)
            continue
        if share_prompts and all(s.shared_prefix_tokens for s in unit):
            groups[n], prefixes[n] = unit[0].group, unit[0].shared_prefix_tokens
        sizes[n] = sum(lengths) - len(unit) * prefixes[n]
    bins = fill_bins(
        prefixes,
        sizes,
        groups,
        num_rows=np.array([len(unit) for unit in members], dtype=np.int64),
        budget=micro_batch_tokens,
        world_size=world_size,
        share_prompts=share_prompts,
        padded=padded,
    )

    def chosen(numbers: tuple[int, ...]) -> tuple[TrainSequence, ...]:
        return tuple(s for n in numbers for s in members[n])

    num_trajectories = len({s.trajectory for s in sequences})
    num_loss_tokens = sum(s.num_loss_tokens for s in sequences)
    return tuple(
        TrainBatch(
            micro_batches=tuple(map(chosen, micro_batches)),
            streams=tuple(tuple(map(chosen, parts)) for parts in streams),
            micro_batch_tokens=micro_batch_tokens,
            num_trajectories=num_trajectories,
            num_loss_tokens=num_loss_tokens,
            num_over_budget=bins.num_over_budget,
            whole_trajectories=whole_trajectories,
        )
        for micro_batches, streams in zip(bins.per_rank, bins.streams_per_rank, strict=True)
    )
