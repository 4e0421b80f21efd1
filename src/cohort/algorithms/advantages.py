"""Rewards to advantages. P prompts, G generations per prompt. A NaN reward was not judged: its advantage is NaN too.

Unjudged completions take no part in the statistics of their group. An advantage is [P, G], one for all tokens of a
completion, or [P, G, L], one for each.
"""

import torch
from torch import Tensor

from cohort.algorithms.critic import gae as gae
from cohort.algorithms.inputs import AdvantageInputs


def group_mean(x: AdvantageInputs) -> Tensor:
    """Reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783)."""
    rewards_PG = x.rewards
    centered = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    # the mean of equal rewards is not always one of them to the last bit; dividing by the std would learn from that
    largest = rewards_PG.nan_to_num(0.0).abs().amax(dim=1, keepdim=True)
    rounding = 8 * torch.finfo(rewards_PG.dtype).eps * largest
    return torch.where(centered.abs() <= rounding, torch.zeros_like(centered), centered)


def group_mean_std(x: AdvantageInputs, *, std_epsilon: float) -> Tensor:
    """Reward minus the mean, over the unbiased standard deviation of its group (GRPO, arXiv:2402.03300, eq. 3).

    A group with a single judged completion has no standard deviation: its advantage is 0.
    """
    centered = group_mean(x)
    num_judged = (~x.rewards.isnan()).sum(dim=1, keepdim=True)
    variance = centered.square().nansum(dim=1, keepdim=True) / (num_judged - 1).clamp(min=1)
    return torch.where(centered == 0, centered, centered / (variance.sqrt() + std_epsilon))
