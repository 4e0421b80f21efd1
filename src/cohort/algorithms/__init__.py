"""Algorithms as pure functions: advantage, policy loss and loss weight."""

from cohort.algorithms.adaptive_coefficients import CoefficientState
from cohort.algorithms.assign import assign_advantages, build_sequences, drop_zero_gradient, mean_reference_kl
from cohort.algorithms.build_algorithm import Algorithm, build_algorithm, check_custom_functions
from cohort.algorithms.gae import critic_sequences, value_metrics
from cohort.algorithms.regularizers import Coefficients
from cohort.algorithms.statistics import AdvantageInputs

__all__ = [
    "AdvantageInputs",
    "Algorithm",
    "CoefficientState",
    "Coefficients",
    "assign_advantages",
    "build_algorithm",
    "build_sequences",
    "check_custom_functions",
    "critic_sequences",
    "drop_zero_gradient",
    "mean_reference_kl",
    "value_metrics",
]
