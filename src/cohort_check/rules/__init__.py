"""The rules of each framework: its batches (numbers in, verdict out), and `*_rules`, which reads them from a launch."""

from cohort_check.launch import Launch
from cohort_check.rules.cohort import cohort_rules
from cohort_check.rules.common import WRAPS, RunRules, Start
from cohort_check.rules.swift import swift_rules
from cohort_check.rules.trl import trl_rules
from cohort_check.rules.verl import verl_rules

__all__ = ["RunRules", "Start", "run_rules"]


def run_rules(launch: Launch, *, framework_version: str | None = None) -> RunRules:
    """Apply the rules of a launch's framework."""
    of_others = {"trl": trl_rules, "ms-swift": swift_rules, "verl": verl_rules}
    rules = of_others.get(WRAPS.get(launch.framework, launch.framework))
    return rules(launch, framework_version) if rules else cohort_rules(launch)
