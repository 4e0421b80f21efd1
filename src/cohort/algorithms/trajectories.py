"""Sums over the loss tokens of a trajectory, in packed rows. T loss tokens; trajectories are whole."""

import torch
from torch import Tensor


def trajectory_sums(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Sum of values [T] over a token's trajectory, for each of its tokens: [T] float64, with a gradient.

    float64, since thousands of tokens are added up, and the sum must not hang on the order in which they are.
    """
    ids, place = trajectory_ids.unique(return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double())[place]


def trajectory_means(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Mean of values [T] over a token's trajectory, for each of its tokens: [T] float64, with a gradient."""
    return trajectory_sums(values, trajectory_ids) / trajectory_sums(torch.ones_like(values), trajectory_ids)
