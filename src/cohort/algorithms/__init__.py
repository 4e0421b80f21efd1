"""Algorithms: each is an advantage, a policy loss and a loss weight, all pure functions."""

from cohort.algorithms.assign import assign_advantages, bare_sequences, with_gradient
from cohort.algorithms.critic import value_metrics, with_returns
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.table import Algorithm, build_algorithm

__all__ = [
    "AdvantageInputs",
    "Algorithm",
    "assign_advantages",
    "bare_sequences",
    "build_algorithm",
    "value_metrics",
    "with_gradient",
    "with_returns",
]
