"""Signs of reward hacking and of rewards without a signal, per reward and step.

P prompts, G generations, N completions.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cohort.metrics.rollouts import has_equal_values
from cohort.records import FloatArray, ScoredGroup
from cohort.warning_signs import WINDOW, all_groups_equal, constant_reward, shorter_but_higher

_TOLERANCE = 1e-8


def reward_health_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return two metrics for each reward.

    `rewards/NAME/frac_zero_std` is the share of groups in which all its values are equal, among those that it scored;
    NaN if it scored none.
    `rewards/NAME/length_correlation` is Pearson's correlation of its values and the lengths in tokens, over the
    completions that it scored; 0 if either is constant.
    """
    metrics = {}
    lengths_N = np.array([len(t.sampled_token_ids) for group in groups for t in group.trajectories], float)
    for name in groups[0].reward_parts:
        parts_PG = [group.reward_parts[name] for group in groups]
        equal = [has_equal_values(part) for part in parts_PG if not np.isnan(part).all()]
        metrics[f"rewards/{name}/frac_zero_std"] = float(np.mean(equal)) if equal else math.nan
        metrics[f"rewards/{name}/length_correlation"] = _correlation(np.concatenate(parts_PG), lengths_N)
    return metrics


class RewardWatch:
    """Compares the metrics of recent steps and warns once about each reward and sign. A resumed run starts anew."""

    def __init__(self, weights: Mapping[str, float], *, shaping: Collection[str] = ()) -> None:
        """Create a watch.

        Args:
            weights: weight of each reward by name; those with weight 0 are only logged, and are not watched.
            shaping: names of rewards that may have no effect for long, such as penalties of long texts.
        """
        self._weights = {name: weight for name, weight in weights.items() if weight}
        self._shaping = frozenset(shaping)
        self._first: list[Mapping[str, float]] = []  # metrics of the first WINDOW steps
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._had_variance: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def warnings(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return warnings about the step that just ended. `metrics` are its training metrics."""
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._last.append(metrics)
        self._had_variance |= {name for name in self._weights if metrics[f"rewards/{name}/frac_zero_std"] < 1}
        if len(self._last) < WINDOW:
            return []
        found = {("collapse", name): self._collapse(step, name) for name in self._weights}
        found |= {("saturated", name): self._saturated(step, name) for name in self._weights}
        found["no variance", ""] = self._no_variance(step)
        new = {sign: text for sign, text in found.items() if text and sign not in self._warned}
        self._warned |= new.keys()
        return list(new.values())

    def _collapse(self, step: int, name: str) -> str:
        """A reward rises while completions become much shorter than at the start."""
        sign = shorter_but_higher(self._first, list(self._last), name, self._weights[name])
        if sign is None:
            return ""
        return (
            f"warning: step {step}: reward {name!r} went from {sign.value_before:.3g} to {sign.value:.3g} while "
            f"completions shrank from {sign.length_before:.0f} to {sign.length:.0f} tokens (means of {WINDOW} steps); "
            f"read some completions: it may reward short texts"
        )

    def _saturated(self, step: int, name: str) -> str:
        """A reward has had the same value for every completion of the window."""
        value = None if name in self._shaping else constant_reward(list(self._last), name)
        if value is None:
            return ""
        return (
            f"warning: step {step}: reward {name!r} has been {value:.3g} for every completion of the last {WINDOW} "
            f"steps, so it gives no signal"
        )

    def _no_variance(self, step: int) -> str:
        """All groups have had equal rewards for a window, but had not before."""
        if not all_groups_equal(list(self._last)):
            return ""
        lost = sorted(self._had_variance) or sorted(self._weights)
        which = ", ".join(f"{name!r} at {self._last[-1][f'rewards/{name}/mean']:.3g}" for name in lost)
        return (
            f"warning: step {step}: in each of the last {WINDOW} steps all rewards of each group were equal ({which}): "
            f"there is nothing to learn from; use harder or easier prompts, or rollout.resample"
        )


def _correlation(values_N: FloatArray, lengths_N: FloatArray) -> float:
    scored = ~np.isnan(values_N)
    values, lengths = values_N[scored], lengths_N[scored]
    if len(values) < 2 or np.ptp(values) < _TOLERANCE or np.ptp(lengths) == 0:
        return 0.0
    return float(np.corrcoef(values, lengths)[0, 1])
