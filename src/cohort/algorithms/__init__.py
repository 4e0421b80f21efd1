"""Algorithms as pure functions: advantage, policy loss and loss weight."""

from cohort.algorithms.assign import assign_advantages, bare_sequences, mean_reference_kl, with_gradient
from cohort.algorithms.control import CoefficientState
from cohort.algorithms.critic import value_metrics, with_returns
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.table import Algorithm, build_algorithm, check_custom_functions
from cohort.algorithms.terms import Coefficients

__all__ = [
    "AdvantageInputs",
    "Algorithm",
    "CoefficientState",
    "Coefficients",
    "assign_advantages",
    "bare_sequences",
    "build_algorithm",
    "check_custom_functions",
    "mean_reference_kl",
    "value_metrics",
    "with_gradient",
    "with_returns",
]
