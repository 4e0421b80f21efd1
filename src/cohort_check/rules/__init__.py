"""The rules of each framework: its batches (numbers in, verdict out), and `*_rules`, which reads them from a launch."""

from cohort_check.launch import Launch
from cohort_check.rules.cohort import cohort_rules
from cohort_check.rules.common import RunRules, Start
from cohort_check.rules.swift import swift_rules
from cohort_check.rules.trl import trl_rules
from cohort_check.rules.verl import verl_rules

__all__ = ["RunRules", "Start", "run_rules"]


def run_rules(launch: Launch, *, framework_version: str | None = None) -> RunRules:
    """Apply the rules of a launch's framework."""
    if launch.framework in ("trl", "open-r1"):
        return trl_rules(launch, framework_version)
    if launch.framework == "ms-swift":
        return swift_rules(launch, framework_version)
    if launch.framework == "verl":
        return verl_rules(launch, framework_version)
    return cohort_rules(launch)
