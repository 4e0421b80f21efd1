"""Sums over the loss tokens of a trajectory, in packed rows. T loss tokens; trajectories are whole."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum of values [T] over a token's trajectory, for each of its tokens: [T] float64, with a gradient.

    float64, since thousands of tokens are added up, and the sum must not hang on the order in which they are.
    """
    ids, place = sequence_ids.unique(return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double())[place]


def sequence_means(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean of values [T] over a token's trajectory, for each of its tokens: [T] float64, with a gradient."""
    return sequence_sums(values, sequence_ids) / sequence_sums(torch.ones_like(values), sequence_ids)
