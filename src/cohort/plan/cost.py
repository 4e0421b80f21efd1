"""Predicted step times and run cost, with the origin of every number.

Good enough to see which phase dominates and what a change is worth; trust a run's own metrics over it.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from cohort.config import Config
from cohort.plan.defaults import compute_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.layout import GpuLayout
from cohort.plan.step import PlannedStep
from cohort.plan.timing import BUS_BANDWIDTH, Rate, compute_rate, memory_rate, training_operations

Origin = Literal["measured", "assumed", "derived"]


class Source(NamedTuple):
    """Origin of a number, and how it was found."""

    origin: Origin
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """A number of a plan and its origin."""

    value: float
    origin: Origin
    how: str


_PUBLISHING = "weights at the speed of the bus, with sleep and wake-up of servers on shared GPUs (assumed)"


def plan_timing(
    config: Config, hardware: Hardware, layout: GpuLayout, step: PlannedStep, *, num_steps: int | None
) -> dict[str, PlannedValue]:
    """Seconds per phase, with the rates used, and GPU hours if the number of steps is known.

    Returns nothing for a CPU without an earlier run: CPUs differ too much.
    """
    if not hardware.on_gpu and hardware.pace is None:
        return {}
    pace, times, blocking = hardware.pace, step.times, step.blocking
    computing = compute_rate(hardware, compute_dtype(config.model, on_gpu=hardware.on_gpu))
    reading = memory_rate(hardware)
    overlapped = {name: _derived(seconds, how) for name, (seconds, how) in step.overlapped.items()}
    used = f"at {computing.utilization:.0%} of that (assumed)"
    if step.waits:
        used += ", less than the overlapped copies"
    used += "".join(f", and {what}" for what in blocking)
    operations = ", ".join(training_operations(config, step.workload.shape))
    sampler = (
        f"weights, keys and values are read at {reading.utilization:.0%} of the bandwidth, or computed with at "
        f"{computing.utilization:.0%}"
    )
    if config.rollout.shares_weights:
        sampler += "; the local engine is slower than that"
    if hardware.lengths is not None:
        sampler += f"; completions of {hardware.lengths.mean} tokens in the mean ({hardware.lengths.source})"
    bus = PlannedValue(value=BUS_BANDWIDTH * 1e-9, origin="assumed", how="typical of PCIe 4.0 x16")
    numbers = {
        "products_tflops": _peak(computing, 1e-12),
        "memory_gbytes/s": _peak(reading, 1e-9),
        **({"bus_gbytes/s": bus} if blocking or "offloading_s" in overlapped else {}),
        "training_s": _paced(times.training_s, f"{operations} {used}", pace.training if pace else None, hardware),
        **overlapped,
        "sampling_s": _paced(times.sampling_s, f"{sampler} (assumed)", pace.sampling if pace else None, hardware),
        **({"publish_s": _derived(times.publish_s, _PUBLISHING)} if times.publish_s else {}),
        "step_s": _derived(times.step_s, "the longer phase" if times.overlap else "one phase after the other"),
    }
    return numbers if num_steps is None else {**numbers, **_run_hours(times.step_s * num_steps, num_steps, layout)}


def _run_hours(seconds: float, num_steps: int, layout: GpuLayout) -> dict[str, PlannedValue]:
    hours, gpus = seconds / 3600, layout.num_used
    return {
        "run_hours": _derived(hours, f"{num_steps} step{'s' * (num_steps != 1)}"),
        "gpu_hours": _derived(hours * gpus, f"{gpus} GPU{'s' * (gpus > 1)}"),
    }


def _derived(value: float, how: str) -> PlannedValue:
    return PlannedValue(value=value, origin="derived", how=how)


def _paced(value: float, how: str, ratio: float | None, hardware: Hardware) -> PlannedValue:
    if ratio is None or hardware.pace is None:
        return _derived(value, how)
    whose = "the data sheet's" if hardware.on_gpu else "the nominal rates'"
    return PlannedValue(
        value=value, origin="measured", how=f"in {hardware.pace.run}: {ratio:.3g}x of {whose} time; {how}"
    )


def _peak(rate: Rate, unit: float) -> PlannedValue:
    return PlannedValue(value=rate.peak * unit, origin="assumed", how=rate.source)
