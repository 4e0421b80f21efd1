"""Advantage estimators. P prompts, G generations per prompt, K rewards, L tokens of the longest completion.

Each returns [P, G] (one advantage per completion) or [P, G, L] (one per token). A NaN reward means "not scored": the
advantage is NaN too, and the reward is excluded from all statistics. Group estimators give 0 to a completion without
other scored completions in its group, and exactly 0 to groups of equal rewards.
"""

import math

import torch
from torch import Tensor

from cohort.algorithms.gae import gae as gae
from cohort.algorithms.statistics import (
    AdvantageInputs,
    center,
    count_scored,
    std,
    token_rewards,
    whiten,
    whiten_tokens,
)
from cohort.errors import UserError


def group_mean(x: AdvantageInputs) -> Tensor:
    """Reward minus the group mean (Dr. GRPO, arXiv:2503.20783)."""
    return center(x.rewards, dim=1)


def group_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward minus the group mean, over the group's unbiased standard deviation (GRPO, arXiv:2402.03300, eq. 3)."""
    return whiten(x.rewards, dim=1, std_epsilon=std_epsilon)


def leave_one_out(x: AdvantageInputs) -> Tensor:
    """Reward minus the mean of the group's other rewards (RLOO, arXiv:2402.14740, eq. 7)."""
    num_scored = count_scored(x.rewards, dim=1)
    return center(x.rewards, dim=1) * num_scored / (num_scored - 1).clamp(min=1)


def group_mean_batch_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward minus the group mean, over the standard deviation of the step's rewards (arXiv:2508.08221)."""
    centered = center(x.rewards, dim=1)
    return torch.where(centered == 0, centered, centered / (std(x.rewards.flatten(), dim=0) + std_epsilon))


def batch_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Return from each token on, whitened over the step's tokens (REINFORCE++, arXiv:2501.03262).

    Works with one completion per prompt.
    """
    return whiten_tokens(_returns(x), x, std_epsilon)


def group_mean_whitened(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Like `batch_mean_std`, with the group's mean reward as baseline (REINFORCE++ with baseline, arXiv:2501.03262)."""
    before = x.rewards.unsqueeze(-1) - _returns(x)  # penalties of earlier tokens
    return whiten_tokens(center(x.rewards, dim=1).unsqueeze(-1) - before, x, std_epsilon)


def per_reward_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Whiten each reward in its group, then whiten their weighted sum over the step (GDPO, arXiv:2601.05242).

    A reward that did not score a completion contributes 0.
    """
    unscored_PG = x.rewards.isnan()
    # shaping rewards have a number even for a completion that was not scored
    parts_PGK = x.reward_parts.masked_fill(unscored_PG.unsqueeze(-1), math.nan)
    each_PGK = whiten(parts_PGK, dim=1, std_epsilon=std_epsilon).where(~parts_PGK.isnan(), 0.0)
    sums_PG = (each_PGK * x.reward_weights).sum(dim=-1).masked_fill(unscored_PG, math.nan)
    return whiten(sums_PG.flatten(), dim=0, std_epsilon=std_epsilon).view_as(x.rewards)


def max_likelihood(x: AdvantageInputs) -> Tensor:
    """Reward minus the group mean, over the group mean: the gradient of log(success rate) (MaxRL, arXiv:2602.02710).

    A group of rewards 0 has advantage 0.

    Raises:
        UserError: a reward is negative, so the mean is not a success rate.
    """
    if (x.rewards < 0).any():
        raise UserError(
            f"algorithm.advantage: max_likelihood needs rewards of at least 0, but one is {_smallest(x.rewards):.4g}; "
            f"use rewards of 0 and 1 and no kl_in: reward, or advantage: group_mean_std"
        )
    centered = center(x.rewards, dim=1)
    return torch.where(centered == 0, centered, centered / x.rewards.nanmean(dim=1, keepdim=True))


def max_at_k(x: AdvantageInputs, *, at_k: int) -> Tensor:
    """Marginal contribution of a completion to the maximum of `at_k` rewards (PKPO, arXiv:2505.15201).

    An unbiased estimate of the gradient of E[max of at_k rewards] with the paper's leave-one-out-minus-one baseline:
    the mean over all subsets of at_k completions of max(subset) - max(subset without this one), times the group size,
    since the loss is a mean over completions and the paper's a sum. Never negative. Groups with fewer than `at_k`
    scored completions have advantage 0.
    """
    rewards_PG = x.rewards
    ascending_PG, order_PG = rewards_PG.nan_to_num(nan=math.inf).sort(dim=1)  # not scored: last
    counts = [int(n) for n in count_scored(rewards_PG, dim=1)]
    shares = {n: _shares_of_sets(n, at_k, rewards_PG.shape[1]) for n in set(counts)}
    shares_P1G = torch.tensor([shares[n] for n in counts], dtype=rewards_PG.dtype).unsqueeze(1)
    differences_PGG = (ascending_PG.unsqueeze(2) - ascending_PG.unsqueeze(1)).clamp(min=0)
    scaled_PG = (differences_PGG * shares_P1G).tril(-1).sum(dim=2)
    return torch.zeros_like(rewards_PG).scatter(1, order_PG, scaled_PG).where(~rewards_PG.isnan(), math.nan)


def _shares_of_sets(n: int, at_k: int, size: int) -> list[float]:
    """[G] n times the share of at_k-subsets of n in which a larger reward comes next after the j-th smallest.

    The other at_k - 2 members are among the j below it. Divides integers, because large binomials overflow floats.
    """
    return [n * math.comb(j, at_k - 2) / math.comb(n, at_k) if at_k <= n and j < n else 0.0 for j in range(size)]


def _returns(x: AdvantageInputs) -> Tensor:
    """[P, G, L] sum of token rewards from each token on."""
    return token_rewards(x).flip(-1).cumsum(dim=-1).flip(-1)


def _smallest(rewards: Tensor) -> float:
    return rewards[~rewards.isnan()].min().item()
