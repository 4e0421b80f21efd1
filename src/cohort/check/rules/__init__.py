"""One module for each framework: pure functions, numbers in, verdict out; `*_run` takes the numbers out of a launch."""

from collections.abc import Callable

from cohort.check.launch import Launch
from cohort.check.rules.cohort import judge_cohort
from cohort.check.rules.start import Judged, Start
from cohort.check.rules.swift_run import judge_swift
from cohort.check.rules.trl_run import judge_trl
from cohort.check.rules.verl_run import judge_verl

__all__ = ["Judged", "MemoryEstimate", "Start", "fits_memory", "judge"]

MemoryEstimate = Callable[[Launch, int], float | None]  # peak bytes of one GPU with so many processes; None: unknown


def judge(launch: Launch, *, trl_version: str | None = None) -> Judged:
    """What the rules of its framework say about a launch."""
    if launch.framework in ("trl", "open-r1"):
        return judge_trl(launch, trl_version)
    if launch.framework == "ms-swift":
        return judge_swift(launch)
    if launch.framework == "verl":
        return judge_verl(launch)
    return judge_cohort(launch)


def fits_memory(launch: Launch, world_size: int, gpu_bytes: float, estimate: MemoryEstimate) -> bool | None:
    """Whether the estimated peak fits a GPU; None where the estimate does not know. No finding is made of it yet."""
    peak = estimate(launch, world_size)
    return None if peak is None else peak <= gpu_bytes
