"""Algorithms: each is an advantage, a policy loss and a loss weight, all pure functions."""

from cohort.algorithms.assign import assign_advantages, with_gradient
from cohort.algorithms.table import Algorithm, build_algorithm

__all__ = ["Algorithm", "assign_advantages", "build_algorithm", "with_gradient"]
