"""Scored groups to training sequences: advantages over whole groups, loss weights over the whole step.

P prompts, G generations, N = P x G completions, K rewards, L tokens of the longest completion, C of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.table import Algorithm
from cohort.errors import TrainingError
from cohort.records import Estimates, FloatArray, IntArray, RolloutGroup, ScoredGroup, TrainSequence


def with_gradient(sequences: Sequence[TrainSequence], algorithm: Algorithm) -> list[TrainSequence]:
    """The sequences whose loss has a gradient; the others need not be computed, and the step's gradient is the same.

    Without a gradient are sequences of loss weight 0, and those of advantage 0 where nothing else pulls at them: the
    policy losses are all of the form advantage times something. They still count in the loss weights' denominators.
    """
    return [s for s in sequences if s.loss_weights.any() and (s.advantages.any() or algorithm.learns_without_advantage)]


def bare_sequences(groups: Sequence[RolloutGroup | ScoredGroup]) -> list[TrainSequence]:
    """One sequence per completion, group after group, of loss weight and advantage 0: nothing is learned from them."""
    sequences: list[TrainSequence] = []
    for g, group in enumerate(groups):
        for completion in group.completions:
            zeros = np.zeros(len(completion.token_ids))
            sequences.append(
                TrainSequence(
                    token_ids=np.concatenate([group.prompt.token_ids, completion.token_ids]),
                    num_prompt_tokens=len(group.prompt.token_ids),
                    index=len(sequences),
                    group=g,
                    sampling_logprobs=completion.sampling_logprobs,
                    loss_weights=zeros,
                    advantages=zeros,
                )
            )
    return sequences


def assign_advantages(
    groups: Sequence[ScoredGroup],
    algorithm: Algorithm,
    estimates: Estimates | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> list[TrainSequence]:
    """One training sequence per completion, group after group.

    Args:
        groups: P scored groups of G completions each.
        algorithm: gives the advantage and the loss weight.
        estimates: what the algorithm asks for, of all completions.
        reward_weights: of each part of the reward, for advantages that look at them one by one.

    Returns:
        P x G sequences. Completions that no reward judged, and truncated ones where the algorithm masks them, have
        loss weight 0.
    """
    x = advantage_inputs(groups, estimates or Estimates(), reward_weights or {})
    sequences = bare_sequences(groups)
    lengths_N = x.lengths.flatten().numpy()
    included_N = ~x.rewards.flatten().isnan().numpy()
    advantages_NL = _checked(algorithm.advantage(x), x).flatten(0, 1).numpy()
    returns_NL = None if algorithm.critic is None else algorithm.critic.returns(x).flatten(0, 1).numpy()
    if algorithm.mask_truncated:
        included_N &= np.array([c.finish_reason == "stop" for group in groups for c in group.completions])
    weights_N = algorithm.loss_weight(lengths_N, included_N)
    return [
        replace(
            sequence,
            loss_weights=np.full(length, weight),
            advantages=advantages[:length] if included else np.zeros(length),
            returns=np.zeros(0) if returns_NL is None or not included else returns_NL[sequence.index, :length],
        )
        for sequence, length, weight, included, advantages in zip(
            sequences, lengths_N, weights_N, included_N, advantages_NL, strict=True
        )
    ]


def advantage_inputs(
    groups: Sequence[ScoredGroup], estimates: Estimates, reward_weights: Mapping[str, float]
) -> AdvantageInputs:
    """What the advantage looks at, of P groups of G completions each."""
    lengths_PG = np.array([[len(c.token_ids) for c in group.completions] for group in groups], dtype=np.int64)
    rewards_PG = np.stack([group.rewards for group in groups])
    judged_PG = ~np.isnan(rewards_PG)
    tokens_PGL = np.zeros((*lengths_PG.shape, lengths_PG.max()))
    last_PG = (*np.indices(lengths_PG.shape), lengths_PG - 1)
    tokens_PGL[last_PG] = np.where(judged_PG, rewards_PG, 0.0)
    parts = [w * np.stack([g.reward_parts[name] for g in groups]) for name, w in reward_weights.items()]
    return AdvantageInputs(
        rewards=torch.from_numpy(np.where(judged_PG, tokens_PGL.sum(axis=-1), np.nan)),
        reward_parts=torch.from_numpy(np.stack(parts, axis=-1) if parts else rewards_PG[..., None]),
        token_rewards=torch.from_numpy(tokens_PGL),
        lengths=torch.from_numpy(lengths_PG),
        values=torch.from_numpy(_padded(estimates.values, lengths_PG)) if estimates.values else None,
    )


def _padded(values: Mapping[int, FloatArray], lengths_PG: IntArray) -> FloatArray:
    """Values of completions [C], by index, as [P, G, L] with zeros beyond."""
    padded_NL = np.zeros((lengths_PG.size, lengths_PG.max()))
    for index, of_tokens in values.items():
        padded_NL[index, : len(of_tokens)] = of_tokens
    return padded_NL.reshape(*lengths_PG.shape, -1)


def _checked(advantages: Tensor, x: AdvantageInputs) -> Tensor:
    """Advantages as [P, G, L].

    Raises:
        TrainingError: they have another shape, or that of a judged completion is NaN or infinite.
    """
    shape, dim = tuple(x.token_rewards.shape), advantages.dim()
    if tuple(advantages.shape) not in (shape[:2], shape):
        raise TrainingError(
            f"algorithm.advantage: gave a tensor of shape {tuple(advantages.shape)}; it must be {shape[:2]}, one for "
            f"each completion, or {shape}, one for each of its tokens"
        )
    judged = ~x.rewards.isnan() if dim == 2 else x.token_mask
    if not advantages[judged].isfinite().all():
        raise TrainingError("algorithm.advantage: the advantage of a judged completion is NaN or infinite")
    return (advantages.unsqueeze(-1) if dim == 2 else advantages).expand(shape).double()
