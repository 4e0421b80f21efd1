"""Rewards to advantages. P prompts, G generations per prompt, K rewards, L tokens of the longest completion.

A NaN reward was not judged: its advantage is NaN too, and it takes no part in any statistic. A completion without a
judged peer, where peers are asked for, has advantage 0. Rewards that are all equal have advantage 0 to the last bit. An
advantage is [P, G], one for all tokens of a completion, or [P, G, L], one for each.
"""

import math

import torch
from torch import Tensor

from cohort.algorithms.critic import gae as gae
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.statistics import center, count_judged, std, whiten, whiten_tokens
from cohort.errors import UserError


def group_mean(x: AdvantageInputs) -> Tensor:
    """Reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783)."""
    return center(x.rewards, dim=1)


def group_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward minus the mean, over the unbiased standard deviation of its group (GRPO, arXiv:2402.03300, eq. 3)."""
    return whiten(x.rewards, dim=1, std_epsilon=std_epsilon)


def leave_one_out(x: AdvantageInputs) -> Tensor:
    """Reward minus the mean of the others of its group (RLOO, arXiv:2402.14740, eq. 7)."""
    num_judged = count_judged(x.rewards, dim=1)
    return center(x.rewards, dim=1) * num_judged / (num_judged - 1).clamp(min=1)


def group_mean_batch_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward minus the mean of its group, over the standard deviation of all rewards of the step (arXiv:2508.08221)."""
    centered = center(x.rewards, dim=1)
    return torch.where(centered == 0, centered, centered / (std(x.rewards.flatten(), dim=0) + std_epsilon))


def batch_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward still to come at each token, whitened over the tokens of the step (REINFORCE++, arXiv:2501.03262).

    No peers are asked for: one completion of a prompt is enough.
    """
    return whiten_tokens(_returns(x), x, std_epsilon)


def group_mean_whitened(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """As `batch_mean_std`, after the mean reward of the group was taken away (REINFORCE++ with baseline, as above)."""
    before = x.rewards.unsqueeze(-1) - _returns(x)  # what penalties at tokens before this one have added
    return whiten_tokens(center(x.rewards, dim=1).unsqueeze(-1) - before, x, std_epsilon)


def per_reward_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Each reward whitened in its group, their weighted sum whitened over the step (GDPO, arXiv:2601.05242).

    A reward that did not judge a completion adds nothing to it.
    """
    unjudged_PG = x.rewards.isnan()
    parts_PGK = x.reward_parts.masked_fill(unjudged_PG.unsqueeze(-1), math.nan)  # one that only shapes has its number
    each_PGK = whiten(parts_PGK, dim=1, std_epsilon=std_epsilon).where(~parts_PGK.isnan(), 0.0)
    sums_PG = (each_PGK * x.reward_weights).sum(dim=-1).masked_fill(unjudged_PG, math.nan)
    return whiten(sums_PG.flatten(), dim=0, std_epsilon=std_epsilon).view_as(x.rewards)


def max_likelihood(x: AdvantageInputs) -> Tensor:
    """Reward minus the mean, over the mean of its group (MaxRL, arXiv:2602.02710): the gradient of log(success rate).

    A group of reward 0 has advantage 0.

    Raises:
        UserError: a reward is negative; then the mean says nothing about a rate of success.
    """
    if (x.rewards < 0).any():
        raise UserError(
            f"algorithm.advantage: max_likelihood takes rewards of at least 0, and one is {_smallest(x.rewards):.4g}; "
            f"use rewards of 0 and 1 and no kl_in: reward, or advantage: group_mean_std"
        )
    centered = center(x.rewards, dim=1)
    return torch.where(centered == 0, centered, centered / x.rewards.nanmean(dim=1, keepdim=True))


def max_at_k(x: AdvantageInputs, *, at_k: int) -> Tensor:
    """What a completion adds to the best of `at_k`, over all choices of the others (PKPO, arXiv:2505.15201).

    The unbiased estimate of the gradient of E[max of at_k rewards] with the paper's leave-one-out-minus-one baseline:
    the mean over all sets of at_k completions of max(set) - max(set without this one), times the n of its group, since
    the loss is a mean over completions and the paper's a sum. Never negative. A group of fewer than `at_k` judged
    completions has no such set: its advantage is 0.
    """
    rewards_PG = x.rewards
    ascending_PG, order_PG = rewards_PG.nan_to_num(nan=math.inf).sort(dim=1)  # unjudged ones last
    counts = [int(n) for n in count_judged(rewards_PG, dim=1)]
    shares = {n: _shares_of_sets(n, at_k, rewards_PG.shape[1]) for n in set(counts)}
    shares_P1G = torch.tensor([shares[n] for n in counts], dtype=rewards_PG.dtype).unsqueeze(1)
    differences_PGG = (ascending_PG.unsqueeze(2) - ascending_PG.unsqueeze(1)).clamp(min=0)
    scaled_PG = (differences_PGG * shares_P1G).tril(-1).sum(dim=2)
    return torch.zeros_like(rewards_PG).scatter(1, order_PG, scaled_PG).where(~rewards_PG.isnan(), math.nan)


def _shares_of_sets(n: int, at_k: int, size: int) -> list[float]:
    """[G] n times the share of sets of at_k of n in which one with a larger reward follows on the j-th smallest.

    There at_k - 2 more are of the j below it. Whole numbers are divided, since of large groups they are no floats.
    """
    return [n * math.comb(j, at_k - 2) / math.comb(n, at_k) if at_k <= n and j < n else 0.0 for j in range(size)]


def _returns(x: AdvantageInputs) -> Tensor:
    """[P, G, L] the sum of token rewards from a token on."""
    return x.token_rewards.flip(-1).cumsum(dim=-1).flip(-1)


def _smallest(rewards: Tensor) -> float:
    return rewards[~rewards.isnan()].min().item()
