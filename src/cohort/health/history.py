"""What rules look at: a run's metrics so far, and ranges of its steps."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from cohort.health.facts import RunFacts
from cohort.health.findings import Sign
from cohort.health.metrics_table import MetricsTable
from cohort.health.trends import Trend, trend
from cohort.records import BoolArray, FloatArray, IntArray

WINDOW = 10  # steps that are compared, or in which a reward has to have no signal
_MOST_RECENT = 50  # steps
_HALF_FROM = 40  # steps from which on the recent trend is that of the second half
_MATTERS = 0.02  # of the largest reward: smaller rises and falls are none
_TOLERANCE = 1e-6  # of rewards, relative to the largest possible one

_MEAN = re.compile("rewards/.+/mean")

Condition = Callable[["History"], Iterable[Sign]]


class History:
    """A run so far.

    `first` is the first `WINDOW` steps. `recent` is the last tenth of the steps, at least `WINDOW` and at most 50.
    """

    def __init__(self, table: MetricsTable, facts: RunFacts):
        self.steps = table.steps
        self.num = len(table.steps)
        self.num_recent = int(np.clip(self.num // 10, WINDOW, _MOST_RECENT))
        self.facts = facts
        self.evaluations = table.eval
        self._table = table
        self._signs: dict[Condition, list[Sign]] = {}

    def signs(self, condition: Condition) -> list[Sign]:
        """Return the signs of a condition, which is evaluated once."""
        if condition not in self._signs:
            self._signs[condition] = list(condition(self))
        return self._signs[condition]

    def column(self, name: str) -> FloatArray:
        """[steps] values of a metric; NaN where it is missing."""
        return self._table.column(name)

    def first(self, name: str) -> FloatArray:
        """Values of a metric in the first steps, without missing ones."""
        return finite(self.column(name)[:WINDOW])

    def recent(self, name: str) -> FloatArray:
        """Values of a metric in the recent steps, without missing ones."""
        return finite(self.column(name)[-self.num_recent :])

    def recent_rows(self, where: BoolArray) -> IntArray:
        """Rows of the recent steps among those that a mask selects."""
        rows = np.flatnonzero(where)
        return rows[rows >= self.num - self.num_recent]

    def recent_mean(self, name: str) -> float:
        """Mean of the recent values; NaN without any."""
        values = self.recent(name)
        return float(values.mean()) if len(values) else np.nan

    def medians(self, name: str) -> tuple[float, float]:
        """Medians of the first and of the recent values; NaN without any."""
        first, recent = (float(np.median(v)) if len(v) else np.nan for v in (self.first(name), self.recent(name)))
        return first, recent

    def rows_scored_by(self, reward: str) -> IntArray:
        """Rows of the steps in which a reward scored anything; `where` may leave it out of others."""
        return np.flatnonzero(np.isfinite(self.column(f"rewards/{reward}/mean")))

    def known(self, *names: str) -> tuple[str, ...]:
        """Return the metrics that the run has, or the first name if it has none."""
        have = {*self._table.names, *self.evaluations.names}
        return tuple(name for name in dict.fromkeys(names) if name in have) or names[:1]

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weights of the rewards by name, without those that are only logged."""
        names = [n[len("rewards/") : -len("/mean")] for n in self._table.names if _MEAN.fullmatch(n)]
        weights = {name: self.facts.weights.get(name, 1.0) for name in names}
        return {name: weight for name, weight in weights.items() if weight}

    @cached_property
    def main_rewards(self) -> dict[str, float]:
        """`weights` without rewards that only shape others."""
        return {name: weight for name, weight in self.weights.items() if name not in self.facts.shaping}

    @cached_property
    def maximum_reward(self) -> float | None:
        """Largest possible reward: the sum of the positive weights, if the rewards seen are from 0 to that sum.

        Rewards that only shape others are penalties: they add nothing to it, and reach below 0.
        """
        maximum = sum(weight for weight in self.main_rewards.values() if weight > 0)
        low, high = finite(self.column("reward_min")), finite(self.column("reward_max"))
        if not maximum or not len(low) or not len(high) or high.max() > maximum * (1 + _TOLERANCE):
            return None
        has_penalties = len(self.main_rewards) < len(self.weights)
        return maximum if has_penalties or low.min() >= -maximum * _TOLERANCE else None

    @cached_property
    def reward_trend(self) -> Trend:
        """Trend of the reward over the whole run."""
        return self._reward_trend(0)

    @cached_property
    def recent_reward_trend(self) -> Trend:
        """Trend of the reward in the second half of the run, or the whole run if it is short."""
        return self._reward_trend(self.num // 2) if self.num >= _HALF_FROM else self.reward_trend

    def _reward_trend(self, start: int) -> Trend:
        """Trend without rises or falls that are significant but too small to matter."""
        reward = self.column("reward")
        found = trend(reward[start:])
        largest = np.abs(finite(reward)).max(initial=0.0)
        return found if abs(found.rise) >= _MATTERS * max(largest, 1e-9) else Trend(rise=found.rise)

    @cached_property
    def accuracies(self) -> FloatArray:
        """Held-out accuracies."""
        return finite(self.evaluations.column("eval/accuracy"))


def finite(values: FloatArray) -> FloatArray:
    """Return the values that are not missing."""
    return values[np.isfinite(values)]
