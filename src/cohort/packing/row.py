"""Sequences to the tensors of one micro-batch.

S input tokens of the row, T scored tokens.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.batch import MicroBatch
from cohort.records import IntArray, TrainSequence
from cohort.segments import ROOT, lay_out


def collate(sequences: Sequence[TrainSequence], *, share_prompts: bool) -> MicroBatch:
    """The row of a micro-batch: every prompt and then its completions, or every sequence by itself.

    Without sequences the row is one token after which nothing is scored. Forward and backward run, and the gradient is
    0: for ranks that have nothing to compute while others do.

    Args:
        sequences: in any order; the scored tokens keep it.
        share_prompts: completions of one group go on from one prompt. A prompt with one completion is one segment.
    """
    row = _Row()
    group_sizes = Counter(s.group for s in sequences)
    prompts: dict[int, int] = {}  # group -> segment
    source = []
    for s in sequences:
        num_prompt, inputs = s.num_prompt_tokens, s.token_ids[:-1]
        # position p predicts token p + 1: the prompt's last token predicts the first of each of its completions
        if not share_prompts or group_sizes[s.group] == 1:
            source.append(row.positions(row.add(inputs))[num_prompt - 1 :])
            continue
        if s.group not in prompts:
            prompts[s.group] = row.add(inputs[:num_prompt])
        source.append(row.positions(prompts[s.group])[-1:])
        if len(inputs) > num_prompt:
            source.append(row.positions(row.add(inputs[num_prompt:], root=prompts[s.group])))
    if not sequences:
        row.add(np.zeros(1, dtype=np.int64))
    lengths = [s.num_completion_tokens for s in sequences]
    return MicroBatch(
        input_ids=_joined(row.inputs),
        position_ids=_joined(row.position_ids()),
        segments=lay_out([len(ids) for ids in row.inputs], row.roots),
        source=_joined(source),
        targets=_joined([s.token_ids[s.num_prompt_tokens :] for s in sequences]),
        sampling_logprobs=_joined([s.sampling_logprobs for s in sequences], np.float64),
        advantages=_joined([np.full(n, s.advantage) for n, s in zip(lengths, sequences, strict=True)], np.float64),
        loss_weights=_joined([s.loss_weights for s in sequences], np.float64),
        sequence_ids=_joined([np.full(n, i) for i, n in enumerate(lengths)]),
    )


class _Row:
    """Segments as they are put one after the other."""

    def __init__(self) -> None:
        self.inputs: list[IntArray] = []  # per segment
        self.roots: list[int] = []  # per segment, the one that it goes on from
        self._starts: list[int] = [0]

    def add(self, inputs: IntArray, *, root: int = ROOT) -> int:
        """Put a segment at the end; its number."""
        self.inputs.append(inputs)
        self.roots.append(root)
        self._starts.append(self._starts[-1] + len(inputs))
        return len(self.inputs) - 1

    def positions(self, segment: int) -> IntArray:
        """Where a segment's tokens are in the row."""
        return np.arange(self._starts[segment], self._starts[segment + 1])

    def position_ids(self) -> list[IntArray]:
        """Each token's position in its own sequence, per segment."""
        offsets = [0 if root == ROOT else len(self.inputs[root]) for root in self.roots]
        return [offset + np.arange(len(ids)) for offset, ids in zip(offsets, self.inputs, strict=True)]


def _joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]))
