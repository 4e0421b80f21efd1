"""Statistics of an evaluation: its accuracy with a confidence interval, and pass@k.

Q questions, n completions of each, c of them successes.
"""

from math import comb, sqrt
from typing import Any

import numpy as np

from cohort.records import IntArray

_Z = 1.959963984540054  # 95%


def accuracy_point(step: int, num_right: IntArray, num: IntArray) -> dict[str, Any]:
    """Return an evaluation's accuracy with its 95% interval and pass@k, from [Q] right completions and completions."""
    total = int(num.sum())
    accuracy = int(num_right.sum()) / total if total else None
    low, high = (None, None) if accuracy is None else wilson_interval(accuracy, effective_trials(num_right, num))
    return {
        "step": step,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "num_questions": int((num > 0).sum()),
        "pass_at": pass_at_k(num_right, num),
    }


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a share of `num` independent trials (Wilson 1927)."""
    if num <= 0:
        return 0.0, 1.0
    spread = _Z * sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    center, scale = share + _Z**2 / (2 * num), 1 + _Z**2 / num
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def effective_trials(num_right: IntArray, num: IntArray) -> float:
    """Return how many independent completions tell as much about the accuracy as these, which share questions.

    The variance of the accuracy p is taken over questions (a ratio estimator with questions as clusters), and the
    number is p (1 - p) / variance. With one completion per question it is the number of questions. It is at least 1, at
    most the number of completions, and the number of questions if all or no completions succeed.
    """
    counted = num > 0
    right, total = num_right[counted].astype(np.float64), num[counted].astype(np.float64)
    if not len(total):
        return 0.0
    share = right.sum() / total.sum()
    if share in (0.0, 1.0):
        return float(len(total))
    variance = ((right - share * total) ** 2).sum() / total.sum() ** 2
    return float(np.clip(share * (1 - share) / variance, 1, total.sum())) if variance > 0 else float(total.sum())


def pass_at_k(num_right: IntArray, num: IntArray) -> dict[str, float]:
    """Return pass@k for powers of two and the most completions of a question, by k.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374), averaged over the questions
    with at least k completions.
    """
    most = int(num.max(initial=0))
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return {str(k): _pass_at(k, num_right[num >= k], num[num >= k]) for k in ([*powers, most] if most else [])}


def _pass_at(k: int, num_right: IntArray, num: IntArray) -> float:
    pairs, counts = np.unique(np.stack([num_right, num]), axis=1, return_counts=True)
    each = [1 - comb(n - c, k) / comb(n, k) for c, n in pairs.T.tolist()]
    return float(np.average(each, weights=counts))
