"""Algorithms as pure functions: advantage, policy loss and loss weight."""

from cohort.algorithms.adaptive_coefficients import CoefficientState
from cohort.algorithms.advantage_inputs import AdvantageInputs
from cohort.algorithms.assign import assign_advantages, build_sequences, mean_reference_kl, with_gradient
from cohort.algorithms.gae import value_metrics, with_returns
from cohort.algorithms.regularizers import Coefficients
from cohort.algorithms.table import Algorithm, build_algorithm, check_custom_functions

__all__ = [
    "AdvantageInputs",
    "Algorithm",
    "CoefficientState",
    "Coefficients",
    "assign_advantages",
    "build_algorithm",
    "build_sequences",
    "check_custom_functions",
    "mean_reference_kl",
    "value_metrics",
    "with_gradient",
    "with_returns",
]
