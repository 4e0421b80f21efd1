"""What the rules look at: the metrics and the configuration of a run, and the ranges of steps that they compare."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from cohort.config import ALGORITHMS, COMPONENTS
from cohort.view.files import number
from cohort.view.health.trends import Trend, trend
from cohort.view.metrics_table import MetricsTable
from cohort.view.records import Evidence, FloatArray
from cohort.warning_signs import WINDOW

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
