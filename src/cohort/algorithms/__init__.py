"""Algorithms: each is an advantage, a policy loss and a loss weight, all pure functions."""

from cohort.algorithms.assign import assign_advantages, bare_sequences, mean_reference_kl, with_gradient
from cohort.algorithms.control import Control
from cohort.algorithms.critic import value_metrics, with_returns
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.table import Algorithm, build_algorithm, check_own_functions
from cohort.algorithms.terms import Coefficients

__all__ = [
    "AdvantageInputs",
    "Algorithm",
    "Coefficients",
    "Control",
    "assign_advantages",
    "bare_sequences",
    "build_algorithm",
    "check_own_functions",
    "mean_reference_kl",
    "value_metrics",
    "with_gradient",
    "with_returns",
]
