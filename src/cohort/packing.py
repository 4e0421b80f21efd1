"""Training sequences to micro-batches under a hard token budget.

Completions of one prompt share its computation: the prompt is a root row, and each completion a branch row that goes
on from it. Without sharing every sequence is a root row of its own.

B root rows, S the longest, D branch rows, C the longest, T scored tokens, N sequences of the step.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from cohort.batch import MicroBatch, TrainBatch
from cohort.records import IntArray, TrainSequence

# One more micro-batch costs about as much time as computing this many more positions.
_MICRO_BATCH_POSITIONS = 512
# Where micro-batches may be closed early, a row this much shorter than the longest starts the next one.
_MUCH_SHORTER = 0.75


def pack(
    sequences: Sequence[TrainSequence], *, micro_batch_tokens: int, pad_token_id: int, share_prompts: bool
) -> TrainBatch:
    """Split a step's sequences over micro-batches of at most `micro_batch_tokens` positions, padding included.

    A sequence that is longer than the budget gets a micro-batch of its own. The gradient of the step does not depend
    on the split: every token brings its own loss weight. So of several splits the one that computes least is taken.

    Args:
        sequences: of the whole step, in any order.
        micro_batch_tokens: largest number of positions computed at a time.
        pad_token_id: fills the rows.
        share_prompts: compute the prompt of a group once per micro-batch instead of once per completion.
    """
    if not sequences:
        return TrainBatch(micro_batches=(), num_sequences=0, num_over_budget=0)
    num_inputs = np.array([len(s.token_ids) - 1 for s in sequences])  # the last token predicts nothing that is scored
    if share_prompts:
        roots = np.array([s.num_prompt_tokens for s in sequences])
        groups = [s.group for s in sequences]
    else:
        roots = num_inputs
        groups = list(range(len(sequences)))
    branches = num_inputs - roots
    splits = [
        _split(order, roots, branches, groups, micro_batch_tokens, close_early=close_early)
        for order in _orders(roots, branches, groups)
        for close_early in (True, False)
    ]
    rows_of_best = min(splits, key=lambda split: sum(_MICRO_BATCH_POSITIONS + cost for _, cost in split))
    return TrainBatch(
        micro_batches=tuple(
            _micro_batch([(n, sequences[n]) for n in rows], pad_token_id, share_prompts) for rows, _ in rows_of_best
        ),
        num_sequences=len(sequences),
        num_over_budget=int((num_inputs > micro_batch_tokens).sum()),
    )


def _orders(roots: IntArray, branches: IntArray, groups: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows of equal length together, for least padding; or whole groups together, for fewest repeated prompts."""
    lengths = roots + branches
    longest: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(longest.get(group, 0), int(length))
    numbers = range(len(groups))
    by_length = sorted(numbers, key=lambda n: (-branches[n], -roots[n]))
    by_group = sorted(numbers, key=lambda n: (-longest[groups[n]], groups[n], -lengths[n]))
    return by_length, by_group


def _split(
    order: Iterable[int], roots: IntArray, branches: IntArray, groups: Sequence[int], budget: int, *, close_early: bool
) -> list[tuple[list[int], int]]:
    """Fill micro-batches one after the other in the given order: each one's sequences and its positions."""
    split: list[tuple[list[int], int]] = []
    rows: list[int] = []
    members: set[int] = set()
    root_width = branch_width = positions = 0
    for n in order:
        width = max(branch_width, int(branches[n])), max(root_width, int(roots[n]))
        larger = (len(members) + (groups[n] not in members)) * width[1] + (len(rows) + 1) * width[0]
        shorter = branches[n] < _MUCH_SHORTER * branch_width or roots[n] + branches[n] < _MUCH_SHORTER * root_width
        if rows and (larger > budget or (close_early and shorter and positions >= 2 * _MICRO_BATCH_POSITIONS)):
            split.append((rows, positions))
            rows, members = [], set()
            width = int(branches[n]), int(roots[n])
            larger = sum(width)
        rows.append(n)
        members.add(groups[n])
        (branch_width, root_width), positions = width, larger
    split.append((rows, positions))
    return split


def _micro_batch(rows: Sequence[tuple[int, TrainSequence]], pad_token_id: int, share_prompts: bool) -> MicroBatch:
    sequences = [s for _, s in rows]
    if share_prompts:
        root_of_group: dict[int, int] = {}
        for s in sequences:
            root_of_group.setdefault(s.group, len(root_of_group))
        prompt_of_group = {s.group: s.token_ids[: s.num_prompt_tokens] for s in sequences}
        root_rows = [prompt_of_group[group] for group in root_of_group]
        root_of_row = [root_of_group[s.group] for s in sequences]
        branch_rows = [s.token_ids[s.num_prompt_tokens : -1] for s in sequences]
    else:
        root_rows, root_of_row, branch_rows = [s.token_ids[:-1] for s in sequences], list(range(len(rows))), []
    root_ids, branch_ids = _padded(root_rows, pad_token_id), _padded(branch_rows, pad_token_id)
    source = []
    for row, s in enumerate(sequences):
        # position p predicts token p + 1: the prompt's last token predicts the first of the completion
        first = root_of_row[row] * root_ids.shape[1] + s.num_prompt_tokens - 1
        start = root_ids.size + row * branch_ids.shape[1] if share_prompts else first + 1
        source.append(np.concatenate([[first], start + np.arange(s.num_completion_tokens - 1)]))
    lengths = [s.num_completion_tokens for s in sequences]

    def joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))

    return MicroBatch(
        root_ids=torch.from_numpy(root_ids),
        root_lengths=torch.tensor([len(r) for r in root_rows]),
        branch_ids=torch.from_numpy(branch_ids),
        branch_roots=torch.tensor(root_of_row if share_prompts else [], dtype=torch.int64),
        source=joined(source),
        targets=joined([s.token_ids[s.num_prompt_tokens :] for s in sequences]),
        sampling_logprobs=joined([s.sampling_logprobs for s in sequences]),
        advantages=joined([np.full(n, s.advantage) for n, s in zip(lengths, sequences, strict=True)]),
        loss_weights=joined([s.loss_weights for s in sequences]),
        sequence_ids=joined([np.full(n, i, dtype=np.int64) for n, (i, _) in zip(lengths, rows, strict=True)]),
        num_input_tokens=sum(len(r) for r in (*root_rows, *branch_rows)),
    )


def _padded(rows: Sequence[IntArray], pad_token_id: int) -> IntArray:
    """Rows of one width, filled on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), pad_token_id, dtype=np.int64)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded
