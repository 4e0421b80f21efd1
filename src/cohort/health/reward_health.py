"""Signs of reward hacking and of rewards without a signal, per reward and step.

P prompts, G generations, N completions.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cohort.health.warning_signs import WINDOW, all_groups_equal, constant_reward, outweighed, shorter_but_higher
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
    lengths_N = np.array([len(t.sampled_token_ids) for group in groups for t in group.trajectories], float)
    for name in groups[0].reward_parts:
        parts_PG = [group.reward_parts[name] for group in groups]
        metrics[f"rewards/{name}/frac_unscored"] = float(np.isnan(np.concatenate(parts_PG)).mean())
        equal = [has_equal_values(part) for part in parts_PG if not np.isnan(part).all()]
        metrics[f"rewards/{name}/frac_zero_std"] = float(np.mean(equal)) if equal else math.nan
        metrics[f"rewards/{name}/length_correlation"] = _correlation(np.concatenate(parts_PG), lengths_N)
    return metrics


class RewardWatch:
    """Compares the metrics of recent steps and warns once about each reward and sign. A resumed run starts anew."""

    def __init__(
        self, weights: Mapping[str, float], *, shaping: Collection[str] = (), compares_spreads: bool = True
    ) -> None:
        """Create a watch.

        Args:
            weights: weight of each reward by name; those with weight 0 are only logged, and are not watched.
            shaping: names of rewards that may have no effect for long, such as penalties of long texts.
            compares_spreads: whether rewards are added up as they are. False: the advantage normalizes each.
        """
        self._weights = {name: weight for name, weight in weights.items() if weight}
        self._shaping = frozenset(shaping)
        self._compares_spreads = compares_spreads
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        # of the steps in which a reward scored anything: `where` may leave it out of others
        self._first_of: dict[str, list[Mapping[str, float]]] = {name: [] for name in self._weights}  # the first WINDOW
        self._last_of: dict[str, deque[Mapping[str, float]]] = {name: deque(maxlen=WINDOW) for name in self._weights}
        self._had_variance: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def warnings(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return warnings about the step that just ended. `metrics` are its training metrics."""
        self._last.append(metrics)
        found: dict[tuple[str, str], str] = {}
        for name in self._weights:
            if math.isnan(metrics[f"rewards/{name}/mean"]):
                continue
            first, last = self._first_of[name], self._last_of[name]
            last.append(metrics)
            if len(first) < WINDOW:
                first.append(metrics)
            if len(last) == WINDOW:
                found["collapse", name] = self._collapse(step, name)
                found["saturated", name] = self._saturated(step, name)
        self._had_variance |= {name for name in self._weights if metrics[f"rewards/{name}/frac_zero_std"] < 1}
        if len(self._last) == WINDOW:
            found["no variance", ""] = self._no_variance(step)
            found["outweighed", ""] = self._outweighed(step)
        new = {sign: text for sign, text in found.items() if text and sign not in self._warned}
        self._warned |= new.keys()
        return list(new.values())

    def _steps_of(self, name: str) -> str:
        """Describe the window of a reward."""
        return f"{WINDOW} steps" + (" that it scored" if list(self._last_of[name]) != list(self._last) else "")

    def _collapse(self, step: int, name: str) -> str:
        """A reward rises while completions become much shorter than at the start."""
        sign = shorter_but_higher(self._first_of[name], list(self._last_of[name]), name, self._weights[name])
        if sign is None:
            return ""
        return (
            f"warning: step {step}: reward {name!r} went from {sign.value_before:.3g} to {sign.value:.3g} while "
            f"completions shrank from {sign.length_before:.0f} to {sign.length:.0f} tokens (means of "
            f"{self._steps_of(name)}); read some completions: it may reward short texts"
        )

    def _saturated(self, step: int, name: str) -> str:
        """A reward has had the same value for every completion of the window."""
        value = None if name in self._shaping else constant_reward(list(self._last_of[name]), name)
        if value is None:
            return ""
        return (
            f"warning: step {step}: reward {name!r} has been {value:.3g} for every completion of the last "
            f"{self._steps_of(name)}, so it gives no signal"
        )

    def _outweighed(self, step: int) -> str:
        """One reward varies so much more than another that the other has no effect."""
        weights = {name: weight for name, weight in self._weights.items() if name not in self._shaping}
        sign = outweighed(list(self._last), weights) if self._compares_spreads else None
        if sign is None:
            return ""
        widest, narrowest, ratio = sign
        return (
            f"warning: step {step}: reward {widest!r} varies {ratio:,.0f} times as much as {narrowest!r} (standard "
            f"deviations of the last {WINDOW} steps times their weights), which so has next to no effect; lower the "
            f"weight of {widest!r}, use its scale or clip, or algorithm.name: gdpo, which normalizes each reward"
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
