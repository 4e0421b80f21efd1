"""Statistics of rewards that ignore NaN ("not scored").

P prompts, G generations, L tokens of the longest completion.
"""

import math

import torch
from torch import Tensor

from cohort.algorithms.advantage_inputs import AdvantageInputs


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


def whiten_tokens(values_PGL: Tensor, x: AdvantageInputs, std_epsilon: float) -> Tensor:
    """[P, G, L] whitened over the tokens of scored completions; 0 elsewhere."""
    mask = x.token_mask
    if not mask.any():
        return torch.zeros_like(values_PGL)
    whitened = whiten(values_PGL[mask], dim=0, std_epsilon=std_epsilon)
    return torch.zeros_like(values_PGL).masked_scatter(mask, whitened)
