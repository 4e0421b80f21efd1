"""Sequences to the tensors of one micro-batch.

S input tokens of the row, T scored tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.batch import MicroBatch
from cohort.records import IntArray, TrainSequence
from cohort.segments import PREFIX, ROOT, lay_out


def collate(sequences: Sequence[TrainSequence], *, share_prompts: bool) -> MicroBatch:
    """The row of a micro-batch: every prompt and then its completions, or every sequence by itself.

    The completions of a group follow its prompt even where other sequences are between them.

    Without sequences the row is one token after which nothing is scored. Forward and backward run, and the gradient is
    0: for ranks that have nothing to compute while others do.

    Args:
        sequences: in any order; the scored tokens keep it.
        share_prompts: completions of one group go on from one prompt. A prompt with one completion is one segment.
    """
    row = _Row()
    sources = [np.zeros(0, dtype=np.int64)] * len(sequences)
    for numbers in _groups(sequences) if share_prompts else [[n] for n in range(len(sequences))]:
        for n, source in zip(numbers, row.add_group([sequences[n] for n in numbers]), strict=True):
            sources[n] = source
    if not sequences:
        row.add(_PLACEHOLDER, count=0)
    return _micro_batch(row, sources, sequences)


def collate_prompt(prompt: IntArray, *, num_completions: int = 1) -> MicroBatch:
    """The row of a prompt that is computed for later micro-batches. Nothing is scored; `source` is its last token.

    Args:
        prompt: [P] token ids; none for ranks that have no prompt to compute while others do.
        num_completions: that will go on from it.
    """
    row = _Row()
    row.add(prompt if len(prompt) else _PLACEHOLDER, count=num_completions if len(prompt) else 0)
    return _micro_batch(row, [np.arange(len(prompt))[-1:]], ())


def collate_part(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """The row of completions of one group whose prompt has been computed before.

    `source` counts the prompt's last token as position 0, and the row's own tokens from 1 on.
    """
    row, sources = _Row(), []
    for s in sequences:
        inputs = s.token_ids[s.num_prompt_tokens : -1]
        sources.append(np.zeros(1, dtype=np.int64))
        if len(inputs):
            sources.append(1 + row.positions(row.add(inputs, root=PREFIX)))
    if not row.inputs:  # completions of one token: all that they need is the prompt's last hidden state
        row.add(_PLACEHOLDER, count=0)
    return _micro_batch(row, sources, sequences, prefix_tokens=sequences[0].num_prompt_tokens)


def _micro_batch(
    row: "_Row", sources: Sequence[IntArray], sequences: Sequence[TrainSequence], *, prefix_tokens: int = 0
) -> MicroBatch:
    lengths = [s.num_completion_tokens for s in sequences]
    return MicroBatch(
        input_ids=_joined(row.inputs),
        position_ids=_joined(row.position_ids(prefix_tokens)),
        input_counts=_joined([np.full(len(ids), n) for ids, n in zip(row.inputs, row.counts, strict=True)]),
        segments=lay_out(
            [len(ids) for ids in row.inputs], row.roots, prefix_tokens=prefix_tokens if PREFIX in row.roots else 0
        ),
        source=_joined(sources),
        targets=_joined([s.token_ids[s.num_prompt_tokens :] for s in sequences]),
        sampling_logprobs=_joined([s.sampling_logprobs for s in sequences], np.float64),
        advantages=_joined([s.advantages for s in sequences], np.float64),
        loss_weights=_joined([s.loss_weights for s in sequences], np.float64),
        returns=_joined([s.returns for s in sequences], np.float64),
        sequence_ids=_joined([np.full(n, i) for i, n in enumerate(lengths)]),
    )


_PLACEHOLDER = np.zeros(1, dtype=np.int64)  # a row has a token at least


class _Row:
    """Segments as they are put one after the other."""

    def __init__(self) -> None:
        self.inputs: list[IntArray] = []  # per segment
        self.roots: list[int] = []  # per segment, the one that it goes on from
        self.counts: list[int] = []  # per segment, the completions that it is part of
        self._starts: list[int] = [0]

    def add_group(self, group: Sequence[TrainSequence]) -> list[IntArray]:
        """Put the sequences of one prompt at the end; for each the positions that predict its completion.

        Position p predicts token p + 1: the prompt's last token predicts the first of each of its completions.
        """
        num_prompt, inputs = group[0].num_prompt_tokens, [s.token_ids[:-1] for s in group]
        if len(group) == 1:
            return [self.positions(self.add(inputs[0]))[num_prompt - 1 :]]
        prompt = self.add(inputs[0][:num_prompt], count=len(group))
        last = self.positions(prompt)[-1:]
        return [
            np.concatenate([last, self.positions(self.add(ids[num_prompt:], root=prompt))])
            if len(ids) > num_prompt
            else last
            for ids in inputs
        ]

    def add(self, inputs: IntArray, *, root: int = ROOT, count: int = 1) -> int:
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
        before = {ROOT: 0, PREFIX: prefix_tokens}
        offsets = [before[root] if root in before else len(self.inputs[root]) for root in self.roots]
        return [offset + np.arange(len(ids)) for offset, ids in zip(offsets, self.inputs, strict=True)]


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Numbers of the sequences of each group, groups in the order of their first sequence."""
    members: dict[int, list[int]] = {}
    for n, s in enumerate(sequences):
        members.setdefault(s.group, []).append(n)
    return list(members.values())


def _joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]))
