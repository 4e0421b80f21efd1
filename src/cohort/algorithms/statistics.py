"""Inputs of an advantage, statistics of rewards that ignore NaN ("not scored"), and sums over trajectories.

P prompts, G generations, L tokens of the longest completion.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Scored completions of a whole step, in float64. NaN means "not scored"."""

    rewards: Tensor  # [P, G] sum of a completion's token rewards
    reward_parts: Tensor  # [P, G, K] each reward separately, without the KL penalty
    reward_weights: Tensor  # [K]
    token_rewards: Tensor | None  # [P, G, L] reward at the last token, minus any KL penalty at each token; 0 past the
    # end; None for built-in algorithms that do not read it
    lengths: Tensor  # [P, G] int64
    values: Tensor | None = None  # [P, G, L] critic's values, 0 past the end; None without a critic

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """P, G and L."""
        num_prompts, num_generations = self.lengths.shape
        return num_prompts, num_generations, max(1, int(self.lengths.max()))

    @property
    def token_mask(self) -> Tensor:
        """[P, G, L] bool: tokens of scored completions."""
        within = torch.arange(self.token_shape[-1]) < self.lengths.unsqueeze(-1)
        return within & ~self.rewards.isnan().unsqueeze(-1)


def center(values: Tensor, *, dim: int) -> Tensor:
    """Subtract the mean, ignoring NaN. Differences due to rounding alone become 0, so dividing by an std is safe."""
    scored = ~values.isnan()
    base = values.where(scored, math.inf).amin(dim=dim, keepdim=True)  # makes equal values exactly 0
    shifted = values - base
    centered = shifted - shifted.nanmean(dim=dim, keepdim=True)
    largest = values.where(scored, 0.0).abs().amax(dim=dim, keepdim=True)
    rounding = 8 * torch.finfo(values.dtype).eps * largest
    return torch.where(centered.abs() <= rounding, torch.zeros_like(centered), centered)


def std(values: Tensor, *, dim: int) -> Tensor:
    """Unbiased standard deviation, ignoring NaN; 0 for a single value."""
    squares = center(values, dim=dim).square().nansum(dim=dim, keepdim=True)
    return (squares / (count_scored(values, dim=dim) - 1).clamp(min=1)).sqrt()


def whiten(values: Tensor, *, dim: int, std_epsilon: float) -> Tensor:
    """Subtract the mean and divide by the standard deviation, ignoring NaN."""
    centered = center(values, dim=dim)
    return torch.where(centered == 0, centered, centered / (std(values, dim=dim) + std_epsilon))


def count_scored(values: Tensor, *, dim: int) -> Tensor:
    """Count values that are not NaN."""
    return (~values.isnan()).sum(dim=dim, keepdim=True)


def token_rewards(x: AdvantageInputs) -> Tensor:
    """Return the token rewards of an algorithm that reads them: [P, G, L]."""
    assert x.token_rewards is not None, "this advantage needs token rewards"
    return x.token_rewards


def whiten_tokens(values_PGL: Tensor, x: AdvantageInputs, std_epsilon: float) -> Tensor:
    """[P, G, L] whitened over the tokens of scored completions; 0 elsewhere."""
    mask = x.token_mask
    if not mask.any():
        return torch.zeros_like(values_PGL)
    whitened = whiten(values_PGL[mask], dim=0, std_epsilon=std_epsilon)
    return torch.zeros_like(values_PGL).masked_scatter(mask, whitened)


def trajectory_sums(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Sum of values [T] over each token's trajectory, for each of its tokens: [T] float64, differentiable.

    float64 makes sums over thousands of tokens independent of their order.
    """
    ids, place = trajectory_ids.unique(return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double())[place]


def trajectory_means(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Mean of values [T] over each token's trajectory, for each of its tokens: [T] float64, differentiable."""
    return trajectory_sums(values, trajectory_ids) / trajectory_sums(torch.ones_like(values), trajectory_ids)
