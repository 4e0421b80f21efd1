"""Pack a step's sequences into micro-batches, and build a micro-batch's tensors.

S tokens of a micro-batch's row, T loss tokens; P tokens of a prompt, L of a sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.packing.batch import MicroBatch, TrainBatch
from cohort.packing.bins import assign_sequences
from cohort.packing.segments import CACHED_PREFIX, NO_PARENT, build_attention_metadata
from cohort.records import IntArray, TrainSequence


def pack(
    sequences: Sequence[TrainSequence],
    *,
    micro_batch_tokens: int,
    dp_size: int = 1,
    share_prompts: bool,
    padded: bool,
    sequence_level: bool = True,
) -> tuple[TrainBatch, ...]:
    """Pack a step's sequences into micro-batches of at most `micro_batch_tokens` positions, and assign them to ranks.

    A sequence that exceeds the budget gets its own micro-batch. A group that exceeds it becomes a split group if that
    is faster: its shared prefix is computed once, and its sequences in parts, each within the budget together with the
    prefix. The gradient of the step does not depend on the split, because every token has its own loss weight.

    Args:
        sequences: sequences of the whole step, in any order.
        micro_batch_tokens: token budget.
        dp_size: data-parallel size: number of ranks with different sequences.
        share_prompts: compute a group's shared prefix once per micro-batch or split group, not once per sequence.
        padded: sequences are padded to the longest of their micro-batch, and padding counts.
        sequence_level: whether the loss sums over a trajectory. If so, its sequences stay in one micro-batch; if they
            exceed the budget together, they get their own.

    Returns:
        One batch per rank, all with the same number of micro-batches, not counting split groups.
    """
    units: dict[int, list[TrainSequence]] = {}  # sequences that stay together
    for s in sequences:
        units.setdefault(s.trajectory if sequence_level else s.index, []).append(s)
    members = list(units.values())
    assignment = assign_sequences(
        *_sizes(members, share_prompts=share_prompts, padded=padded),
        num_rows=np.array([len(unit) for unit in members], dtype=np.int64),
        budget=micro_batch_tokens,
        dp_size=dp_size,
        share_prompts=share_prompts,
        padded=padded,
    )

    def sequences_of(indices: tuple[int, ...]) -> tuple[TrainSequence, ...]:
        return tuple(s for n in indices for s in members[n])

    num_trajectories = len({s.trajectory for s in sequences})
    num_loss_tokens = sum(s.num_loss_tokens for s in sequences)
    return tuple(
        TrainBatch(
            micro_batches=tuple(map(sequences_of, micro_batches)),
            split_groups=tuple(tuple(map(sequences_of, parts)) for parts in split_groups),
            micro_batch_tokens=micro_batch_tokens,
            num_trajectories=num_trajectories,
            num_loss_tokens=num_loss_tokens,
            num_over_budget=assignment.num_over_budget,
            sequence_level=sequence_level,
        )
        for micro_batches, split_groups in zip(assignment.micro_batches, assignment.split_groups, strict=True)
    )


def _sizes(
    units: Sequence[Sequence[TrainSequence]], *, share_prompts: bool, padded: bool
) -> tuple[IntArray, IntArray, list[int]]:
    """Return for each unit the tokens of its shared prefix, its tokens after the prefix, and a group number.

    With padding, the tokens are those of its longest sequence.
    """
    prefixes, sizes = np.zeros((2, len(units)), dtype=np.int64)
    groups = [-1 - n for n in range(len(units))]
    for n, unit in enumerate(units):
        lengths = [len(s.token_ids) - 1 for s in unit]  # the last token of a sequence is not an input
        if share_prompts and not padded and all(s.shared_prefix_tokens for s in unit):
            groups[n], prefixes[n] = unit[0].group, unit[0].shared_prefix_tokens
        sizes[n] = max(lengths) if padded else sum(lengths) - len(unit) * prefixes[n]
    return prefixes, sizes, groups


def collate(sequences: Sequence[TrainSequence], *, share_prompts: bool) -> MicroBatch:
    """Lay out a micro-batch as one packed row: shared prefixes followed by their sequences, or separate sequences.

    Sequences of a group follow their prefix even if they are not adjacent in `sequences`.

    Without sequences the row has one token and no loss tokens. Forward and backward run with a gradient of 0, for ranks
    that have nothing to compute while others do.

    Args:
        sequences: sequences in any order, which is also the order of the loss tokens.
        share_prompts: compute the shared prefix of a group once. A prefix of a single sequence is not split off.
    """
    row = _Row()
    positions: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    for numbers in _groups(sequences) if share_prompts else [[n] for n in range(len(sequences))]:
        for n, input_positions in zip(numbers, row.add_group([sequences[n] for n in numbers]), strict=True):
            positions[n] = input_positions
    if not sequences:
        row.add(_PLACEHOLDER, count=0)
    return _micro_batch(row, _logit_positions(positions, sequences), sequences)


def collate_prompt(prompt: IntArray, *, num_completions: int = 1) -> MicroBatch:
    """Lay out a prompt that later micro-batches continue. It has no loss tokens; `logit_positions` is its last token.

    Args:
        prompt: [P] token ids; empty for ranks that have no prompt to compute while others do.
        num_completions: completions that will continue it.
    """
    row = _Row()
    row.add(prompt if len(prompt) else _PLACEHOLDER, count=num_completions if len(prompt) else 0)
    return _micro_batch(row, [np.arange(len(prompt))[-1:]], ())


def collate_part(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Lay out sequences of one group that continue a cached prefix.

    In `logit_positions`, the last token of the prefix is position 0, and the row's own tokens start at 1.
    """
    row = _Row()
    positions: list[IntArray] = []
    for s in sequences:
        inputs = s.token_ids[s.shared_prefix_tokens : -1]
        own = 1 + row.positions(row.add(inputs, parent=CACHED_PREFIX)) if len(inputs) else inputs
        # of the prefix, only the last token predicts a loss token
        positions.append(np.concatenate([np.zeros(s.shared_prefix_tokens, dtype=np.int64), own]))
    if not row.inputs:  # completions of one token need only the prefix's last hidden state
        row.add(_PLACEHOLDER, count=0)
    prefix_tokens = sequences[0].shared_prefix_tokens
    return _micro_batch(row, _logit_positions(positions, sequences), sequences, prefix_tokens=prefix_tokens)


def _logit_positions(positions: Sequence[IntArray], sequences: Sequence[TrainSequence]) -> list[IntArray]:
    """Select, for each sequence, the positions that predict its loss tokens from those of its inputs [L - 1]."""
    return [input_positions[s.loss_mask[1:]] for input_positions, s in zip(positions, sequences, strict=True)]


def _micro_batch(
    row: "_Row", logit_positions: Sequence[IntArray], sequences: Sequence[TrainSequence], *, prefix_tokens: int = 0
) -> MicroBatch:
    numbers: dict[int, int] = {}  # trajectory -> index in the micro-batch
    for s in sequences:
        numbers.setdefault(s.trajectory, len(numbers))
    return MicroBatch(
        input_ids=_concat(row.inputs),
        position_ids=_concat(row.position_ids(prefix_tokens)),
        input_counts=_concat([np.full(len(ids), n) for ids, n in zip(row.inputs, row.counts, strict=True)]),
        attn_metadata=build_attention_metadata(
            [len(ids) for ids in row.inputs],
            row.parents,
            prefix_tokens=prefix_tokens if CACHED_PREFIX in row.parents else 0,
        ),
        logit_positions=_concat(logit_positions),
        labels=_concat([s.token_ids[s.loss_mask] for s in sequences]),
        sampling_logprobs=_concat([s.sampling_logprobs for s in sequences], np.float64),
        advantages=_concat([s.advantages for s in sequences], np.float64),
        loss_weights=_concat([s.loss_weights for s in sequences], np.float64),
        returns=_concat([s.returns for s in sequences], np.float64),
        trajectory_ids=_concat([np.full(s.num_loss_tokens, numbers[s.trajectory]) for s in sequences]),
    )


_PLACEHOLDER = np.zeros(1, dtype=np.int64)  # a row has at least one token


class _Row:
    """A packed row under construction: consecutive segments."""

    def __init__(self) -> None:
        self.inputs: list[IntArray] = []  # per segment
        self.parents: list[int] = []  # per segment, the one that it continues
        self.counts: list[int] = []  # per segment, the number of sequences that it is part of
        self._starts: list[int] = [0]

    def add_group(self, group: Sequence[TrainSequence]) -> list[IntArray]:
        """Append sequences with a shared prefix; return the positions of each sequence's inputs in the row."""
        num_shared, inputs = group[0].shared_prefix_tokens, [s.token_ids[:-1] for s in group]
        if len(group) == 1:
            return [self.positions(self.add(inputs[0]))]
        prefix = self.add(inputs[0][:num_shared], count=len(group))
        shared = self.positions(prefix)
        return [
            np.concatenate([shared, self.positions(self.add(ids[num_shared:], parent=prefix))])
            if len(ids) > num_shared
            else shared
            for ids in inputs
        ]

    def add(self, inputs: IntArray, *, parent: int = NO_PARENT, count: int = 1) -> int:
        """Append a segment; return its index."""
        self.inputs.append(inputs)
        self.parents.append(parent)
        self.counts.append(count)
        self._starts.append(self._starts[-1] + len(inputs))
        return len(self.inputs) - 1

    def positions(self, segment: int) -> IntArray:
        """Positions of a segment's tokens in the row."""
        return np.arange(self._starts[segment], self._starts[segment + 1])

    def position_ids(self, prefix_tokens: int) -> list[IntArray]:
        """Position of each token in its own sequence, per segment."""
        before = {NO_PARENT: 0, CACHED_PREFIX: prefix_tokens}
        offsets = [before[parent] if parent in before else len(self.inputs[parent]) for parent in self.parents]
        return [offset + np.arange(len(ids)) for offset, ids in zip(offsets, self.inputs, strict=True)]


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Group the indices of sequences by shared prefix, in order of first occurrence."""
    members: dict[int, list[int]] = {}
    for n, s in enumerate(sequences):
        members.setdefault(s.group if s.shared_prefix_tokens else -1 - n, []).append(n)
    return list(members.values())


def _concat(parts: Sequence[np.ndarray], dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]))
