"""One module for each framework: pure functions, numbers in, verdict out; `*_run` takes the numbers out of a launch."""

from dataclasses import replace

from cohort.check.launch import Launch, Setting
from cohort.check.rules.cohort import cohort_rules
from cohort.check.rules.keys import parse_version
from cohort.check.rules.memory import MemoryVerdict, cohort_memory, run_memory
from cohort.check.rules.memory_read import USUAL_PROCESSES, UncheckedError, estimate_memory
from cohort.check.rules.start import RunRules, Start
from cohort.check.rules.swift import swift_rules
from cohort.check.rules.trl_run import trl_rules
from cohort.check.rules.verl import verl_rules
from cohort.config.hardware import MAX_PROCESSES
from cohort.errors import UserError
from cohort.plan.hardware import GPUS, hardware

__all__ = ["MemoryVerdict", "RunRules", "Start", "check_memory", "run_rules"]


def run_rules(launch: Launch, *, framework_version: str | None = None) -> RunRules:
    """Apply the rules of a launch's framework."""
    if launch.framework in ("trl", "open-r1"):
        return trl_rules(launch, framework_version)
    if launch.framework == "ms-swift":
        return swift_rules(launch, framework_version)
    if launch.framework == "verl":
        return verl_rules(launch, framework_version)
    return cohort_rules(launch)


def check_memory(
    launch: Launch, rules: RunRules, *, gpu: str | None, gpu_memory: str | None, processes: int | None = None
) -> MemoryVerdict | None:
    """Check whether a run fits into GPU memory, if the GPUs are given.

    If neither is known, return None unless the run is too large for the largest known GPU.

    Args:
        launch: the run.
        rules: the rules of its framework, applied to it.
        gpu: GPU type by its name in `cohort plan`.
        gpu_memory: memory of each GPU, such as 80GB.
        processes: training processes, if the launch does not say.

    Raises:
        UserError: the GPU or the size is unknown.
    """
    if launch.processes is not None and not 1 <= int(launch.processes.value) <= MAX_PROCESSES:
        return None  # has a finding of its own
    if gpu is None and gpu_memory is None:
        largest = max(GPUS, key=lambda known: GPUS[known][1])
        verdict = check_memory(launch, rules, gpu=largest, gpu_memory=None) if launch.processes else None
        return verdict if verdict and verdict.findings else None
    if launch.processes is None and processes is not None:
        launch = replace(launch, processes=Setting(processes, "--world-sizes"))
    gpus = int(launch.processes.value) if launch.processes else USUAL_PROCESSES
    machines = hardware(gpu=gpu or "h100", gpus=gpus, nodes=1, gpu_memory=gpu_memory)
    if launch.framework == "cohort":
        return cohort_memory(launch, machines)
    try:
        return run_memory(estimate_memory(launch, parse_version(rules.version)), machines)
    except (UncheckedError, UserError) as reason:  # UserError: an adapter that cannot be read
        return MemoryVerdict(f"not checked: {reason}")
