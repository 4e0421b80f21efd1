"""Pack a step's sequences into micro-batches, and build a micro-batch's tensors.

S tokens of a micro-batch's row, T loss tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.attention_mask import CACHED_PREFIX, NO_PARENT, build_attention_metadata
from cohort.batch import MicroBatch, TrainBatch
from cohort.packing.bins import fill_bins
from cohort.records import IntArray, TrainSequence


def pack(
    sequences: Sequence[TrainSequence],
    *,
    micro_batch_tokens: int,
    world_size: int = 1,
    share_prompts: bool,
    padded: bool,
    sequence_level: bool = True,
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
        sequence_level: whether the loss sums over a trajectory. Then its sequences stay in one micro-batch; those that
            are longer than the budget together get a micro-batch of their own.

    Returns:
        One batch per rank, all with the same number of micro-batches; streams come besides.
    """
    units: dict[int, list[TrainSequence]] = {}  # sequences that are computed together
    for s in sequences:
        units.setdefault(s.trajectory if sequence_level else s.index, []).append(s)
    members = list(units.values())
    bins = fill_bins(
        *_sizes(members, share_prompts=share_prompts, padded=padded),
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
            split_groups=tuple(tuple(map(chosen, parts)) for parts in streams),
            micro_batch_tokens=micro_batch_tokens,
            num_trajectories=num_trajectories,
            num_loss_tokens=num_loss_tokens,
            num_over_budget=bins.num_over_budget,
            sequence_level=sequence_level,
        )
        for micro_batches, streams in zip(bins.per_rank, bins.streams_per_rank, strict=True)
    )


def _sizes(
    units: Sequence[Sequence[TrainSequence]], *, share_prompts: bool, padded: bool
) -> tuple[IntArray, IntArray, list[int]]:
    """For each unit the tokens of its shared prefix, its tokens after that, and a number that its group shares.

    For models that pad, the tokens are those of its longest sequence.
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
    """Lay out a micro-batch as one row: every shared prefix and then its branches, or every sequence by itself.

    The sequences of a group follow its prefix even where other sequences are between them.

    Without sequences the row is one token after which nothing is predicted. Forward and backward run, and the gradient
    is 0: for ranks that have nothing to compute while others do.

    Args:
        sequences: in any order; the loss tokens keep it.
        share_prompts: compute the shared prefix of a group once. A prefix with one sequence is one segment with it.
    """
    row = _Row()
    positions = [np.zeros(0, dtype=np.int64)] * len(sequences)
    for numbers in _groups(sequences) if share_prompts else [[n] for n in range(len(sequences))]:
        for n, of_inputs in zip(numbers, row.add_group([sequences[n] for n in numbers]), strict=True):
            positions[n] = of_inputs
    if not sequences:
        row.add(_PLACEHOLDER, count=0)
    return _micro_batch(row, _logit_positions(positions, sequences), sequences)


def collate_prompt(prompt: IntArray, *, num_completions: int = 1) -> MicroBatch:
    """Lay out a prompt that is computed for later micro-batches, without loss tokens.

    `logit_positions` is its last token.

    Args:
        prompt: [P] token ids; none for ranks that have no prompt to compute while others do.
        num_completions: that will go on from it.
    """
    row = _Row()
    row.add(prompt if len(prompt) else _PLACEHOLDER, count=num_completions if len(prompt) else 0)
    return _micro_batch(row, [np.arange(len(prompt))[-1:]], ())


def collate_part(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Lay out sequences of one group whose shared prefix has been computed before.

    `logit_positions` counts the prefix's last token as position 0, and the row's own tokens from 1 on.
    """
    row, positions = _Row(), []
    for s in sequences:
        inputs = s.token_ids[s.shared_prefix_tokens : -1]
        own = 1 + row.positions(row.add(inputs, root=CACHED_PREFIX)) if len(inputs) else inputs
        # in the prefix only the last token predicts one that may be trained
        positions.append(np.concatenate([np.zeros(s.shared_prefix_tokens, dtype=np.int64), own]))
    if not row.inputs:  # one token each after the prefix: all that they need is the prefix's last hidden state
        row.add(_PLACEHOLDER, count=0)
    prefix_tokens = sequences[0].shared_prefix_tokens
    return _micro_batch(row, _logit_positions(positions, sequences), sequences, prefix_tokens=prefix_tokens)


def _logit_positions(positions: Sequence[IntArray], sequences: Sequence[TrainSequence]) -> list[IntArray]:
    """For each sequence the positions that predict its loss tokens, of the positions [L - 1] of its inputs.

    The head computes these alone.
    """
    return [of_inputs[s.loss_mask[1:]] for of_inputs, s in zip(positions, sequences, strict=True)]


def _micro_batch(
    row: "_Row", logit_positions: Sequence[IntArray], sequences: Sequence[TrainSequence], *, prefix_tokens: int = 0
) -> MicroBatch:
    numbers: dict[int, int] = {}  # trajectory -> number in the micro-batch
    for s in sequences:
        numbers.setdefault(s.trajectory, len(numbers))
    return MicroBatch(
        input_ids=_joined(row.inputs),
        position_ids=_joined(row.position_ids(prefix_tokens)),
        input_counts=_joined([np.full(len(ids), n) for ids, n in zip(row.inputs, row.counts, strict=True)]),
        attn_metadata=build_attention_metadata(
            [len(ids) for ids in row.inputs],
            row.roots,
            prefix_tokens=prefix_tokens if CACHED_PREFIX in row.roots else 0,
        ),
        logit_positions=_joined(logit_positions),
        labels=_joined([s.token_ids[s.loss_mask] for s in sequences]),
        sampling_logprobs=_joined([s.sampling_logprobs[s.loss_mask] for s in sequences], np.float64),
        advantages=_joined([s.advantages[s.loss_mask] for s in sequences], np.float64),
        loss_weights=_joined([s.loss_weights[s.loss_mask] for s in sequences], np.float64),
        returns=_joined([s.returns[s.loss_mask] for s in sequences if len(s.returns)], np.float64),
        trajectory_ids=_joined([np.full(s.num_loss_tokens, numbers[s.trajectory]) for s in sequences]),
    )


_PLACEHOLDER = np.zeros(1, dtype=np.int64)  # a row has a token at least


class _Row:
    """Segments as they are put one after the other."""

    def __init__(self) -> None:
        self.inputs: list[IntArray] = []  # per segment
        self.roots: list[int] = []  # per segment, the one that it goes on from
        self.counts: list[int] = []  # per segment, the sequences that it is part of
        self._starts: list[int] = [0]

    def add_group(self, group: Sequence[TrainSequence]) -> list[IntArray]:
        """Append sequences with one shared prefix; for each the positions of its inputs in the row."""
        num_shared, inputs = group[0].shared_prefix_tokens, [s.token_ids[:-1] for s in group]
        if len(group) == 1:
            return [self.positions(self.add(inputs[0]))]
        prefix = self.add(inputs[0][:num_shared], count=len(group))
        shared = self.positions(prefix)
        return [
            np.concatenate([shared, self.positions(self.add(ids[num_shared:], root=prefix))])
            if len(ids) > num_shared
            else shared
            for ids in inputs
        ]

    def add(self, inputs: IntArray, *, root: int = NO_PARENT, count: int = 1) -> int:
        """Put a segment at the end; its number."""
        self.inputs.append(inputs)
        self.roots.append(root)
        self.counts.append(count)
        self._starts.append(self._starts[-1] + len(inputs))
        return len(self.inputs) - 1

    def positions(self, segment: int) -> IntArray:
        """Where a segment's tokens are in the row."""
        return np.arange(self._starts[segment], self._starts[segment + 1])

    def position_ids(self, prefix_tokens: int) -> list[IntArray]:
        """Each token's position in its own sequence, per segment."""
        before = {NO_PARENT: 0, CACHED_PREFIX: prefix_tokens}
        offsets = [before[root] if root in before else len(self.inputs[root]) for root in self.roots]
        return [offset + np.arange(len(ids)) for offset, ids in zip(offsets, self.inputs, strict=True)]


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Numbers of the sequences that share a prefix, in the order of the first of each; one alone shares with nobody."""
    members: dict[int, list[int]] = {}
    for n, s in enumerate(sequences):
        members.setdefault(s.group if s.shared_prefix_tokens else -1 - n, []).append(n)
    return list(members.values())


def _joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]))
