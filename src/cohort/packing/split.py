"""Which rank computes which sequences of a step together."""

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
) -> tuple[TrainBatch, ...]:
    """Split a step's sequences over ranks, and over micro-batches of at most `micro_batch_tokens` positions.

    A sequence that is longer than the budget gets a micro-batch of its own. A group that is larger becomes a stream
    where that pays: its prompt is computed once, and its completions in parts that are under the budget together with
    the prompt. The gradient of the step does not depend on the split: every token brings its own loss weight.

    Args:
        sequences: of the whole step, in any order.
        micro_batch_tokens: largest number of positions computed at a time.
        world_size: number of ranks.
        share_prompts: the prompt of a group is computed once per micro-batch or stream instead of once per completion.
        padded: each sequence is a row as long as its micro-batch's longest, and padding counts.

    Returns:
        One batch per rank, all with the same number of micro-batches; streams come besides.
    """
    num_scored_tokens = np.array([s.num_completion_tokens for s in sequences], dtype=np.int64)
    bins = fill_bins(
        np.array([s.num_prompt_tokens for s in sequences], dtype=np.int64),
        num_scored_tokens - 1,  # the last token of a sequence is not an input
        [s.group for s in sequences],
        budget=micro_batch_tokens,
        world_size=world_size,
        share_prompts=share_prompts,
        padded=padded,
    )
    return tuple(
        TrainBatch(
            micro_batches=tuple(tuple(sequences[n] for n in numbers) for numbers in micro_batches),
            streams=tuple(tuple(tuple(sequences[n] for n in numbers) for numbers in parts) for parts in streams),
            micro_batch_tokens=micro_batch_tokens,
            num_sequences=len(sequences),
            num_scored_tokens=int(num_scored_tokens.sum()),
            num_over_budget=bins.num_over_budget,
        )
        for micro_batches, streams in zip(bins.per_rank, bins.streams_per_rank, strict=True)
    )
