"""What the rules look at: metrics, configuration, ranges of steps, and tests of curves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cohort.config import ALGORITHMS, COMPONENTS
from cohort.health.warning_signs import WINDOW
from cohort_view.metrics_table import MetricsTable
from cohort_view.records import Evidence, FloatArray
from cohort_view.values import number

MIN_POINTS = 8  # below, no trend is significant
_MOST_POINTS = 256  # longer curves are averaged in blocks first
_BLOCKS = 8
_MIN_Z = 5.0  # rise between the first and the last quarter, in standard errors
_MIN_TAU = 0.6  # Kendall's tau of the means of blocks
_MIN_DRIFT = 3.0  # t statistic of the differences of neighbors
_MAX_AUTOCORRELATION = -0.25  # of the differences: -0.5 for noise around a trend, 0 for a random walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a curve changes from its first quarter to its last."""

    rise: float  # mean of the last quarter minus mean of the first
    is_rising: bool  # significantly
    is_falling: bool


def trend(values: FloatArray) -> Trend:
    """Test whether a curve rises or falls. NaNs are left out.

    It rises if three tests agree:

    1. the means of its last and first quarters differ by `_MIN_Z` standard errors. These come from the residuals of the
       best monotone fit and grow with their autocorrelation;
    2. the means of 8 blocks are in order (Kendall's tau at least `_MIN_TAU`), so that a single jump is no trend;
    3. it is no random walk, whose ends differ by chance: either neighbors differ by noise, which the next one takes
       back, or the mean difference is itself significant.
    """
    values = _in_blocks(values[np.isfinite(values)], _MOST_POINTS)
    quarter = max(2, len(values) // 4)
    if len(values) < MIN_POINTS:
        return Trend(rise=0.0, is_rising=False, is_falling=False)
    rise = float(values[-quarter:].mean() - values[:quarter].mean())
    sign = 1.0 if rise >= 0 else -1.0
    is_significant = np.ptp(values) > 0 and _rises(sign * values, quarter) and _is_no_walk(sign * values)
    return Trend(rise=rise, is_rising=bool(is_significant and rise > 0), is_falling=bool(is_significant and rise < 0))


def change_point(values: FloatArray) -> int:
    """Return the index that splits a curve into two parts of the most different means (least squares)."""
    num = len(values)
    sums = np.cumsum(values)[:-1]
    left = np.arange(1, num)
    gain = sums**2 / left + (values.sum() - sums) ** 2 / (num - left)
    return int(np.argmax(gain)) + 1


def _rises(values: FloatArray, quarter: int) -> bool:
    rise = values[-quarter:].mean() - values[:quarter].mean()
    residuals = values - _monotone_fit(values)
    noise = max(residuals.std(), float(np.sqrt(np.mean(np.diff(values) ** 2) / 2)))
    correlation = min(max(_autocorrelation(residuals), 0.0), 0.97)
    error = noise * np.sqrt(2 / quarter * (1 + correlation) / (1 - correlation))
    return bool(rise > _MIN_Z * error and _kendall_tau(_in_blocks(values, _BLOCKS)) >= _MIN_TAU)


def _is_no_walk(values: FloatArray) -> bool:
    differences = np.diff(values)
    drift, error = differences.mean(), differences.std(ddof=1) / np.sqrt(len(differences))
    return bool(drift > _MIN_DRIFT * error or _autocorrelation(differences) < _MAX_AUTOCORRELATION)


def _in_blocks(values: FloatArray, most: int) -> FloatArray:
    """Average neighbors so that at most `most` values are left."""
    if len(values) <= most:
        return values
    return np.array([block.mean() for block in np.array_split(values, most)])


def _monotone_fit(values: FloatArray) -> FloatArray:
    """Return the increasing sequence that is closest to the values (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2:] = [(means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size]
            sizes[-2:] = [size]
    return np.repeat(means, sizes)


def _autocorrelation(values: FloatArray) -> float:
    """Of neighbors; 0 for a constant."""
    centered = values - values.mean()
    variance = float(centered @ centered)
    return float(centered[1:] @ centered[:-1]) / variance if variance > 0 else 0.0


def _kendall_tau(values: FloatArray) -> float:
    """Share of pairs in increasing order minus share in decreasing order."""
    first, second = np.triu_indices(len(values), k=1)
    return float(np.sign(values[second] - values[first]).mean())


_MOST_RECENT = 50  # steps
_SHAPES = ("overlong", "repetition_penalty")  # endings of the built-in rewards that only shape others


class Observed:
    """The metrics of a run so far.

    `first` is the first `WINDOW` steps. `recent` is the last tenth of the steps, at least `WINDOW` and at most 50.
    """

    def __init__(self, table: MetricsTable, config: Mapping[str, Any] | None):
        self.table = table
        self.steps = table.steps
        self.num = len(table.steps)
        self._config = config or {}
        self.num_recent = int(np.clip(self.num // 10, WINDOW, _MOST_RECENT))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a configuration key, such as `rollout.top_p`."""
        value: Any = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, key: str, default: float) -> float:
        """Return a configuration key that is a number."""
        value = number(self.setting(key))
        return default if value is None else value

    def first(self, name: str) -> FloatArray:
        """Values of a metric in the first steps, without missing ones."""
        return _finite(self.table.column(name)[:WINDOW])

    def recent(self, name: str) -> FloatArray:
        """Values of a metric in the recent steps, without missing ones."""
        return _finite(self.table.column(name)[-self.num_recent :])

    def recent_mean(self, name: str) -> float:
        """Mean of the recent values; NaN without any."""
        values = self.recent(name)
        return float(values.mean()) if len(values) else np.nan

    def recent_median(self, name: str) -> float:
        """Median of the recent values; NaN without any."""
        values = self.recent(name)
        return float(np.median(values)) if len(values) else np.nan

    def first_median(self, name: str) -> float:
        """Median of the first values; NaN without any."""
        values = self.first(name)
        return float(np.median(values)) if len(values) else np.nan

    def recent_rows(self, names: list[str], num: int) -> list[dict[str, float]]:
        """The last rows of these metrics, with NaN for missing values."""
        columns = [self.table.column(name)[-num:].tolist() for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def rows_scored_by(self, name: str) -> list[dict[str, float]]:
        """The metrics of a reward, and lengths, in the steps in which it scored anything."""
        kinds = ("mean", "std", "frac_unscored")
        rows = self.recent_rows(["completions/mean_length", *(f"rewards/{name}/{kind}" for kind in kinds)], self.num)
        return [row for row in rows if not math.isnan(row[f"rewards/{name}/mean"])]

    @property
    def last_step(self) -> int:
        """Number of the last step."""
        return int(self.steps[-1])

    @property
    def recent_from(self) -> int:
        """Number of the first recent step."""
        return int(self.steps[-min(self.num_recent, self.num)])

    def evidence(self, *metrics: str, start: int | None = None) -> tuple[Evidence, ...]:
        """Metrics from a step, or from the first recent one, to the last."""
        start = self.recent_from if start is None else start
        known = [m for m in metrics if m in self.table.names or m in self.table.eval.names] or metrics[:1]
        return tuple(Evidence(metric=metric, from_=start, to=self.last_step) for metric in known)

    def whole(self, *metrics: str) -> tuple[Evidence, ...]:
        """Metrics over the whole run."""
        return self.evidence(*metrics, start=int(self.steps[0]))

    @cached_property
    def reward_trend(self) -> Trend:
        """Trend of the reward over the whole run."""
        return self._large_enough(trend(self.table.column("reward")), "reward")

    @cached_property
    def recent_reward_trend(self) -> Trend:
        """Trend of the reward in the second half of the run, or the whole run if it is short."""
        reward = self.table.column("reward")
        return self._large_enough(trend(reward[self.num // 2 :] if self.num >= 40 else reward), "reward")

    def _large_enough(self, found: Trend, name: str) -> Trend:
        """Without rises or falls that are significant but too small to matter."""
        if abs(found.rise) >= 0.02 * max(np.abs(_finite(self.table.column(name))).max(initial=0.0), 1e-9):
            return found
        return Trend(rise=found.rise, is_rising=False, is_falling=False)

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weights of the rewards by name, without those that are only logged. All 1 without a configuration."""
        weights = {}
        for entry in self.setting("rewards", []) if isinstance(self.setting("rewards", []), list) else []:
            if isinstance(entry, Mapping) and isinstance(entry.get("weight", 1.0), int | float):
                weights[str(entry.get("name") or entry.get("use"))] = float(entry.get("weight", 1.0))
        known = [n.split("/")[1] for n in self.table.names if n.startswith("rewards/") and n.endswith("/mean")]
        return {name: weights.get(name, 1.0) for name in known if weights.get(name, 1.0)}

    @cached_property
    def shaping(self) -> frozenset[str]:
        """Names of built-in rewards that only shape others, such as penalties of long texts."""
        entries = self.setting("rewards", [])
        entries = [e for e in entries if isinstance(e, Mapping)] if isinstance(entries, list) else []
        return frozenset(str(e.get("name") or e["use"]) for e in entries if str(e.get("use")).endswith(_SHAPES))

    @cached_property
    def maximum_reward(self) -> float | None:
        """Largest possible reward, if every reward seems to be between 0 and 1: the sum of the positive weights.

        A value between 0 and 1 with mean m has at most the variance m(1 - m), so larger ranges show.
        """
        for name in self.weights.keys() - self.shaping:
            mean, std = self.table.column(f"rewards/{name}/mean"), self.table.column(f"rewards/{name}/std")
            known = np.isfinite(mean) & np.isfinite(std)
            mean, std = mean[known], std[known]
            if not len(mean) or mean.min() < 0 or mean.max() > 1 or (std**2 > 1.1 * mean * (1 - mean) + 1e-6).any():
                return None
        return sum(weight for weight in self.weights.values() if weight > 0) or None

    @cached_property
    def compares_groups(self) -> bool:
        """Whether only groups with different rewards have a reward signal."""
        if self.number("rollout.num_generations", 2) <= 1 or self.setting("algorithm.kl_in") == "reward":
            return False
        named = ALGORITHMS.get(str(self.setting("algorithm.name", "grpo")))
        advantage = self.setting("algorithm.advantage", named.advantage if named else None)
        component = COMPONENTS["advantage"].get(advantage) if isinstance(advantage, str) else None
        return component is not None and not component.learns_from_equal_rewards


def maximum_reward(table: MetricsTable, config: Mapping[str, Any] | None) -> float | None:
    """Return the largest possible reward of a run, if every reward seems to be between 0 and 1."""
    return Observed(table, config).maximum_reward


def _finite(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]
