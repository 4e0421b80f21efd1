"""Scored groups to training sequences: advantages over whole groups, loss weights over the whole step."""

from collections.abc import Sequence

import numpy as np
import torch

from cohort.algorithms.table import Algorithm
from cohort.records import ScoredGroup, TrainSequence


def with_gradient(sequences: Sequence[TrainSequence], algorithm: Algorithm) -> list[TrainSequence]:
    """The sequences whose loss has a gradient; the others need not be computed, and the step's gradient is the same.

    Without a gradient are sequences of loss weight 0, and those of advantage 0 where no KL term pulls at them: the
    policy losses are all of the form advantage times something. They still count in the loss weights' denominators.
    """
    return [s for s in sequences if s.loss_weights.any() and (s.advantage != 0 or algorithm.needs_reference)]


def assign_advantages(groups: Sequence[ScoredGroup], algorithm: Algorithm) -> list[TrainSequence]:
    """One training sequence per completion, group after group.

    Args:
        groups: P scored groups of G completions each.
        algorithm: gives the advantage and the loss weight.

    Returns:
        P x G sequences. Completions that no reward judged, and truncated ones where the algorithm masks them, have
        loss weight 0.
    """
    rewards_PG = torch.from_numpy(np.stack([group.rewards for group in groups]))
    advantages_N = algorithm.advantage(rewards_PG).flatten().numpy()
    completions = [completion for group in groups for completion in group.completions]
    prompts = [(g, group.prompt) for g, group in enumerate(groups) for _ in group.completions]
    lengths_N = np.array([len(c.token_ids) for c in completions], dtype=np.int64)
    included_N = ~np.isnan(advantages_N)
    if algorithm.mask_truncated:
        included_N &= np.array([c.finish_reason == "stop" for c in completions])
    weights_N = algorithm.loss_weight(lengths_N, included_N)
    return [
        TrainSequence(
            token_ids=np.concatenate([prompt.token_ids, completion.token_ids]),
            num_prompt_tokens=len(prompt.token_ids),
            index=n,
            group=g,
            sampling_logprobs=completion.sampling_logprobs,
            loss_weights=np.full(length, weight),
            advantage=float(advantage) if included else 0.0,
        )
        for n, ((g, prompt), completion, length, weight, advantage, included) in enumerate(
            zip(prompts, completions, lengths_N, weights_N, advantages_N, included_N, strict=True)
        )
    ]
