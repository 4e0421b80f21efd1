"""Means and standard deviations of what was judged. NaN means "not judged".

P prompts, G generations, L tokens of the longest completion.
"""

import math

import torch
from torch import Tensor

from cohort.algorithms.inputs import AdvantageInputs


def center(values: Tensor, *, dim: int) -> Tensor:
    """Values minus their mean, NaN left out; 0 where they differ by rounding alone, which an std would blow up."""
    judged = ~values.isnan()
    base = values.where(judged, math.inf).amin(dim=dim, keepdim=True)  # equal values leave 0, and so does their mean
    shifted = values - base
    centered = shifted - shifted.nanmean(dim=dim, keepdim=True)
    largest = values.where(judged, 0.0).abs().amax(dim=dim, keepdim=True)
    rounding = 8 * torch.finfo(values.dtype).eps * largest
    return torch.where(centered.abs() <= rounding, torch.zeros_like(centered), centered)


def std(values: Tensor, *, dim: int) -> Tensor:
    """Unbiased standard deviation, NaN left out; 0 of a single value."""
    squares = center(values, dim=dim).square().nansum(dim=dim, keepdim=True)
    return (squares / (count_judged(values, dim=dim) - 1).clamp(min=1)).sqrt()


def whiten(values: Tensor, *, dim: int, std_epsilon: float) -> Tensor:
    """Values minus their mean over their standard deviation, NaN left out."""
    centered = center(values, dim=dim)
    return torch.where(centered == 0, centered, centered / (std(values, dim=dim) + std_epsilon))


def count_judged(values: Tensor, *, dim: int) -> Tensor:
    """How many are not NaN."""
    return (~values.isnan()).sum(dim=dim, keepdim=True)


def whiten_tokens(values_PGL: Tensor, x: AdvantageInputs, std_epsilon: float) -> Tensor:
    """[P, G, L] whitened over the tokens of judged completions; 0 elsewhere."""
    mask = x.token_mask
    if not mask.any():
        return torch.zeros_like(values_PGL)
    whitened = whiten(values_PGL[mask], dim=0, std_epsilon=std_epsilon)
    return torch.zeros_like(values_PGL).masked_scatter(mask, whitened)
