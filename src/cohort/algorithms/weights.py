"""Loss weights: how the per-token losses of a whole step are summed, as one number per completion.

Every token of completion n has weight w_n and loss = sum over tokens of w_n * l_t. The weights are fixed before the
step is split over micro-batches and ranks, so the split cannot change the gradient. Completions that are left out
(not judged, or truncated where those are masked) weigh 0 and do not count in a mean's denominator.

N completions of the step.
"""

import numpy as np

from cohort.records import FloatArray, IntArray


def sequence_mean(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over completions of the mean over each one's tokens (GRPO, arXiv:2402.03300): 1 / (N * length)."""
    return _where_included(included_N, 1.0 / (max(included_N.sum(), 1) * np.maximum(lengths_N, 1)))


def token_mean(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over all tokens of the step (DAPO, arXiv:2503.14476): 1 / total length.

    What elsewhere is called bnpo, the mean over the tokens of a rank's micro-batch, is this where a step is one
    micro-batch on one rank, and something else with every other split.
    """
    total = lengths_N[included_N].sum()
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / max(total, 1)))


def sequence_sum(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over completions of the sum over each one's tokens: 1 / N.

    The policy gradient's own sum (RLOO, arXiv:2402.14740); of a completion's loss, times its length (LUSPO,
    arXiv:2602.05261).
    """
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / max(included_N.sum(), 1)))


def constant(lengths_N: IntArray, included_N: np.ndarray, *, max_completion_tokens: int) -> FloatArray:
    """Sum over tokens over a constant (Dr. GRPO, arXiv:2503.20783): 1 / (N * max_completion_tokens).

    N counts every completion, left out or not: a constant that no sample can change is the point.
    """
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / (len(lengths_N) * max_completion_tokens)))


def _where_included(included_N: np.ndarray, weights_N: FloatArray) -> FloatArray:
    return np.where(included_N, weights_N, 0.0)
