"""One module for each framework: pure functions, numbers in, verdict out; `*_run` takes the numbers out of a launch."""

from dataclasses import replace

from cohort.check.launch import Launch, Said
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


def run_rules(launch: Launch, *, trl_version: str | None = None) -> RunRules:
    """What the rules of its framework say about a launch."""
    if launch.framework in ("trl", "open-r1"):
        return trl_rules(launch, trl_version)
    if launch.framework == "ms-swift":
        return swift_rules(launch, trl_version)
    if launch.framework == "verl":
        return verl_rules(launch, trl_version)
    return cohort_rules(launch)


def check_memory(
    launch: Launch, rules: RunRules, *, gpu: str | None, gpu_memory: str | None, processes: int | None = None
) -> MemoryVerdict | None:
    """Whether memory suffices, on GPUs that are named or that the file names.

    Where none are, only what the largest that is known does not hold is told; None otherwise.

    Args:
        launch: what is checked.
        rules: by the rules of its framework.
        gpu: its name for `cohort plan`.
        gpu_memory: of each, such as 80GB.
        processes: that train, where the launch does not say.

    Raises:
        UserError: no such GPU or size.
    """
    name = gpu or launch.gpu
    if launch.processes is not None and not 1 <= int(launch.processes.value) <= MAX_PROCESSES:
        return None  # the finding about the number says it all
    if name is None and gpu_memory is None:
        largest = max(GPUS, key=lambda known: GPUS[known][1])
        verdict = check_memory(launch, rules, gpu=largest, gpu_memory=None) if launch.processes else None
        return verdict if verdict and verdict.findings else None
    if launch.processes is None and processes is not None:
        launch = replace(launch, processes=Said(processes, "--world-sizes"))
    gpus = int(launch.processes.value) if launch.processes else USUAL_PROCESSES
    machines = hardware(gpu=name or "h100", gpus=gpus, nodes=1, gpu_memory=gpu_memory)
    if launch.framework == "cohort":
        return cohort_memory(launch, machines)
    try:
        return run_memory(estimate_memory(launch, parse_version(rules.version)), machines)
    except (UncheckedError, UserError) as reason:  # UserError: an adapter that cannot be read
        return MemoryVerdict(f"not checked: {reason}")
