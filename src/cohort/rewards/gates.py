"""Which completions a reward scores: those that its `where` selects and the gates before it let through.

N completions of the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cohort.records import BoolArray, FloatArray
from cohort.rewards.arguments import Sample
from cohort.rewards.function import RewardFunction


class GatedParts:
    """The values of a step's rewards, collected in order.

    A reward does not score broken trajectories and rows that its `where` excludes (NaN). Behind a gate it is 0 for
    completions that the gate does not let through, and NaN for those that the gate did not score.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples  # [N]
        self._passed_N = np.ones(len(samples))  # 1: let through by all gates so far, 0: not, NaN: unknown
        self.values: dict[str, FloatArray] = {}  # reward name -> [N]

    def to_score(self, reward: RewardFunction) -> BoolArray:
        """Which completions the function has to score, [N]."""
        return self._is_for(reward) & (self._passed_N == 1)

    def add(self, reward: RewardFunction, scored: FloatArray) -> None:
        """Add the values that a function returned for the completions of `to_score`; NaN: not scored."""
        is_for_N = self._is_for(reward)
        values_N = np.where(is_for_N & (self._passed_N == 0), 0.0, np.nan)
        values_N[is_for_N & (self._passed_N == 1)] = scaled(reward, scored)
        self.values[reward.name] = values_N

    def close_gates(self, rewards: Sequence[RewardFunction]) -> None:
        """Apply the gates among `rewards`, whose values have been added."""
        for reward in rewards:
            if reward.gate:
                values_N = self.values[reward.name]
                result_N = np.where(np.isnan(values_N), np.nan, values_N >= 1)
                self._passed_N = np.where(self._is_for(reward) & (self._passed_N == 1), result_N, self._passed_N)

    def _is_for(self, reward: RewardFunction) -> BoolArray:
        return np.array(
            [not t.is_broken and selects(reward, prompt.columns) for prompt, t in self._samples], dtype=bool
        )


def stages(functions: Sequence[RewardFunction]) -> list[list[RewardFunction]]:
    """Split rewards behind each gate: those of a stage do not depend on each other's values."""
    split: list[list[RewardFunction]] = [[]]
    for function in functions:
        split[-1].append(function)
        if function.gate:
            split.append([])
    return [stage for stage in split if stage]


def scaled(reward: RewardFunction, values_N: FloatArray) -> FloatArray:
    """Apply `scale`, then `clip`. NaN stays NaN."""
    if isinstance(reward.scale, tuple):
        low, high = reward.scale
        values_N = (values_N - low) / (high - low)
    else:
        values_N = values_N * reward.scale
    return values_N if reward.clip is None else np.clip(values_N, *reward.clip)


def selects(reward: RewardFunction, row: Mapping[str, Any]) -> bool:
    """Whether a reward's `where` selects a row."""
    return all(
        any(_is_same(row.get(column), value) for value in (wanted if _is_list(wanted) else [wanted]))
        for column, wanted in reward.where.items()
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_same(value: Any, wanted: Any) -> bool:
    """Compare numbers as numbers, since a column of integers with gaps holds 1.0 for 1; anything else as text."""
    if value is None or wanted is None:
        return value is wanted
    if isinstance(value, bool) or isinstance(wanted, bool):
        return str(value).lower() == str(wanted).lower()
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return value == wanted
    return str(value) == str(wanted)
