"""Sums and means over trajectories in packed rows. T loss tokens; trajectories are whole."""

import torch
from torch import Tensor


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
