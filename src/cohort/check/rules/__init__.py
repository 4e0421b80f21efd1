"""One module for each framework: pure functions, numbers in, verdict out; `*_run` takes the numbers out of a launch."""

from dataclasses import replace

from cohort.check.launch import Launch, Said
from cohort.check.rules.cohort import judge_cohort
from cohort.check.rules.memory import MemoryVerdict, cohort_memory, run_memory
from cohort.check.rules.memory_read import USUAL_PROCESSES, NotJudgedError, swift_estimate, trl_estimate, verl_estimate
from cohort.check.rules.start import Judged, Start
from cohort.check.rules.swift_run import judge_swift
from cohort.check.rules.trl import parse_version
from cohort.check.rules.trl_run import judge_trl
from cohort.check.rules.verl_run import judge_verl
from cohort.config.hardware import MAX_PROCESSES
from cohort.errors import UserError
from cohort.plan.hardware import GPUS, hardware

__all__ = ["Judged", "MemoryVerdict", "Start", "judge", "judge_memory"]


def judge(launch: Launch, *, trl_version: str | None = None) -> Judged:
    """What the rules of its framework say about a launch."""
    if launch.framework in ("trl", "open-r1"):
        return judge_trl(launch, trl_version)
    if launch.framework == "ms-swift":
        return judge_swift(launch)
    if launch.framework == "verl":
        return judge_verl(launch)
    return judge_cohort(launch)


def judge_memory(
    launch: Launch, judged: Judged, *, gpu: str | None, gpu_memory: str | None, processes: int | None = None
) -> MemoryVerdict | None:
    """Whether memory suffices, on GPUs that are named or that the file names.

    Where none are, only what the largest that is known does not hold is told; None otherwise.

    Args:
        launch: what is judged.
        judged: by the rules of its framework.
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
        verdict = judge_memory(launch, judged, gpu=largest, gpu_memory=None) if launch.processes else None
        return verdict if verdict and verdict.findings else None
    if launch.processes is None and processes is not None:
        launch = replace(launch, processes=Said(processes, "--world-sizes"))
    gpus = int(launch.processes.value) if launch.processes else USUAL_PROCESSES
    machines = hardware(gpu=name or "h100", gpus=gpus, nodes=1, gpu_memory=gpu_memory)
    if launch.framework == "cohort":
        return cohort_memory(launch, machines)
    try:
        if launch.framework == "ms-swift":
            estimate = swift_estimate(launch)
        elif launch.framework == "verl":
            estimate = verl_estimate(launch)
        else:
            estimate = trl_estimate(launch, parse_version(judged.version))
        return run_memory(estimate, machines)
    except (NotJudgedError, UserError) as reason:  # UserError: an adapter that cannot be read
        return MemoryVerdict(f"not judged: {reason}")
