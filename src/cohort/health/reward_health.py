"""Metrics of each reward in a step that show reward hacking and a missing signal.

P prompts, G generations, N completions.
"""

import math
from collections.abc import Sequence

import numpy as np

from cohort.metrics.rollouts import has_equal_values
from cohort.records import FloatArray, ScoredGroup

_TOLERANCE = 1e-8


def reward_health_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return three metrics for each reward.

    `rewards/NAME/frac_unscored` is the share of completions that it did not score.
    `rewards/NAME/frac_zero_std` is the share of groups in which all its values are equal, among those that it scored;
    NaN if it scored none.
    `rewards/NAME/length_correlation` is Pearson's correlation of its values and the lengths in tokens, over the
    completions that it scored; 0 if either is constant.
    """
    metrics = {}
    lengths_N = np.array([t.num_sampled_tokens for group in groups for t in group.trajectories], float)
    for name in groups[0].reward_parts:
        parts_PG = [group.reward_parts[name] for group in groups]
        metrics[f"rewards/{name}/frac_unscored"] = float(np.isnan(np.concatenate(parts_PG)).mean())
        equal = [has_equal_values(part) for part in parts_PG if not np.isnan(part).all()]
        metrics[f"rewards/{name}/frac_zero_std"] = float(np.mean(equal)) if equal else math.nan
        metrics[f"rewards/{name}/length_correlation"] = _correlation(np.concatenate(parts_PG), lengths_N)
    return metrics


def _correlation(values_N: FloatArray, lengths_N: FloatArray) -> float:
    scored = ~np.isnan(values_N)
    values, lengths = values_N[scored], lengths_N[scored]
    if len(values) < 2 or np.ptp(values) < _TOLERANCE or np.ptp(lengths) == 0:
        return 0.0
    return float(np.corrcoef(values, lengths)[0, 1])
