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
from cohort.algorithms.terms import Coefficients
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
    coefficients: Coefficients | None = None,
) -> list[TrainSequence]:
    """One training sequence per completion, group after group.

    Args:
        groups: P scored groups of G completions each.
        algorithm: gives the advantage and the loss weight.
        estimates: what the algorithm asks for, of all completions.
        reward_weights: of each part of the reward, for advantages that look at them one by one.
        coefficients: of a KL divergence that is taken from the rewards; by default those that a run begins with.

    Returns:
        P x G sequences. Completions that no reward judged, and truncated ones where the algorithm masks them, have
        loss weight 0.
    """
    estimates = estimates or Estimates()
    now = coefficients or algorithm.coefficients(algorithm.first_control)
    penalties = {index: now.kl * kl for index, kl in reference_kl(algorithm, estimates).items()}
    x = advantage_inputs(groups, estimates, reward_weights or {}, penalties)
    sequences = bare_sequences(groups)
    lengths_N = x.lengths.flatten().numpy()
    included_N = ~x.rewards.flatten().isnan().numpy()
    advantages_NL = _checked(algorithm.advantage(x), x).flatten(0, 1).numpy()
    returns_NL = None if algorithm.critic is None else algorithm.critic.returns(x).flatten(0, 1).numpy()
    if algorithm.mask_truncated:
        included_N &= np.array([c.finish_reason == "stop" for group in groups for c in group.completions])
    weights_N = algorithm.loss_weight(lengths_N, included_N)
    if algorithm.top_entropy_quantile < 1:
        counted_NL = included_N[:, None] & (np.arange(advantages_NL.shape[1]) < lengths_N[:, None])
        entropies_NL = _padded(estimates.entropies, x.lengths.numpy()).reshape(advantages_NL.shape)
        advantages_NL = advantages_NL * high_entropy(entropies_NL, counted_NL, share=algorithm.top_entropy_quantile)
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


def reference_kl(algorithm: Algorithm, estimates: Estimates) -> dict[int, FloatArray]:
    """The KL divergence from the reference that is taken from the rewards, [C] by index; empty where none is."""
    if algorithm.reward_kl is None:
        return {}
    return {
        index: algorithm.reward_kl(
            torch.from_numpy(logprobs), torch.from_numpy(estimates.reference_logprobs[index])
        ).numpy()
        for index, logprobs in estimates.logprobs.items()
    }


def mean_reference_kl(algorithm: Algorithm, estimates: Estimates) -> dict[str, float]:
    """The metric `kl`: the mean of what is taken from the rewards, before its coefficient, over the step's tokens."""
    of_tokens = list(reference_kl(algorithm, estimates).values())
    return {"kl": float(np.concatenate(of_tokens).mean())} if of_tokens else {}


def high_entropy(entropies_NL: FloatArray, counted_NL: np.ndarray, *, share: float) -> np.ndarray:
    """Which tokens of the step are among those of highest entropy ("Beyond the 80/20 rule", arXiv:2506.01939).

    Args:
        entropies_NL: [N, L] in nats.
        counted_NL: [N, L] bool, tokens of completions that are not left out; the others are never among them.
        share: of the counted tokens; those at or above the quantile 1 - share, one at least.
    """
    if not counted_NL.any():
        return counted_NL
    return counted_NL & (entropies_NL >= np.quantile(entropies_NL[counted_NL], 1 - share))


def advantage_inputs(
    groups: Sequence[ScoredGroup],
    estimates: Estimates,
    reward_weights: Mapping[str, float],
    penalties: Mapping[int, FloatArray],
) -> AdvantageInputs:
    """What the advantage looks at, of P groups of G completions each.

    Args:
        groups: scored.
        estimates: of all completions, where the algorithm asks for them.
        reward_weights: of each part of the reward.
        penalties: [C] by index, taken from the reward of each token.

    Raises:
        TrainingError: there are no groups, they are not of one size, or a completion has no tokens.
    """
    sizes = sorted({len(group.completions) for group in groups})
    if len(sizes) != 1:
        what = f"groups of {' and '.join(map(str, sizes))} completions" if sizes else "no groups"
        raise TrainingError(f"rollout: a step of {what}; it must have groups of one size (rollout.num_generations)")
    lengths_PG = np.array([[len(c.token_ids) for c in group.completions] for group in groups], dtype=np.int64)
    if not lengths_PG.all():
        raise TrainingError("rollout: a completion has no tokens; one that says nothing is an end-of-sequence token")
    rewards_PG = np.stack([group.rewards for group in groups])
    judged_PG = ~np.isnan(rewards_PG)
    tokens_PGL = np.zeros((*lengths_PG.shape, lengths_PG.max()))
    last_PG = (*np.indices(lengths_PG.shape), lengths_PG - 1)
    tokens_PGL[last_PG] = np.where(judged_PG, rewards_PG, 0.0)
    if penalties:
        tokens_PGL -= np.where(judged_PG[..., None], _padded(penalties, lengths_PG), 0.0)
    parts = [np.stack([g.reward_parts[name] for g in groups]) for name in reward_weights]
    return AdvantageInputs(
        rewards=torch.from_numpy(np.where(judged_PG, tokens_PGL.sum(axis=-1), np.nan)),
        reward_parts=torch.from_numpy(np.stack(parts, axis=-1) if parts else rewards_PG[..., None]),
        reward_weights=torch.tensor([*reward_weights.values()] or [1.0], dtype=torch.float64),
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
