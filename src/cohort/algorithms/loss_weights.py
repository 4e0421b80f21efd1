"""Loss weights: how the per-token losses of a step are reduced, as one weight per completion.

loss = sum over tokens of w_n * l_t, where w_n is the weight of the token's completion n. Weights are fixed before the
step is split over micro-batches and ranks, so the split does not change the gradient. Excluded completions (not
scored, or truncated and masked) have weight 0 and do not count in the denominator of a mean.

N completions of the step.
"""

import numpy as np

from cohort.records import FloatArray, IntArray


def sequence_mean(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over completions of each one's token mean (GRPO, arXiv:2402.03300): 1 / (N * length)."""
    return _where_included(included_N, 1.0 / (max(included_N.sum(), 1) * np.maximum(lengths_N, 1)))


def token_mean(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over all tokens of the step (DAPO, arXiv:2503.14476): 1 / total length.

    TRL's bnpo, a mean over each rank's micro-batch, equals this only if a step is one micro-batch on one rank.
    """
    total = lengths_N[included_N].sum()
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / max(total, 1)))


def sequence_sum(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
    """Mean over completions of each one's token sum: 1 / N.

    The plain policy gradient (RLOO, arXiv:2402.14740); with a sequence-level loss, the loss times length (LUSPO,
    arXiv:2602.05261).
    """
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / max(included_N.sum(), 1)))


def constant(lengths_N: IntArray, included_N: np.ndarray, *, max_completion_tokens: int) -> FloatArray:
    """Sum over tokens divided by a constant (Dr. GRPO, arXiv:2503.20783): 1 / (N * max_completion_tokens).

    N counts excluded completions too, so that no sample changes the constant. A completion is everything sampled in a
    trajectory: with several turns, `max_completion_tokens` is the maximum of all of them together.
    """
    return _where_included(included_N, np.full(len(lengths_N), 1.0 / (len(lengths_N) * max_completion_tokens)))


def _where_included(included_N: np.ndarray, weights_N: FloatArray) -> FloatArray:
    return np.where(included_N, weights_N, 0.0)
