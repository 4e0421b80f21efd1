"""How long a step takes and what a run costs, with the origin of every number.

A prediction (`cohort.plan.timing`), good to tell which phase dominates and what a change is worth; a run's own metrics
are the truth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cohort.config import Config
from cohort.plan.activations import offloaded_bytes_per_token
from cohort.plan.defaults import compute_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.layout import Layout
from cohort.plan.rates import Rate, bus_rate, computing_rate, reading_rate
from cohort.plan.rows import Rows
from cohort.plan.timing import step_times, training_operations
from cohort.plan.work import Work

Origin = Literal["measured", "assumed", "derived"]
_REDUCED_BYTES = 4  # of a gradient on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a plan, and where it comes from."""

    value: float
    origin: Origin
    how: str


def plan_timing(
    config: Config, hardware: Hardware, layout: Layout, rows: Rows, work: Work, *, num_steps: int | None
) -> dict[str, Number]:
    """Seconds by phase, what they were worked out from, and the GPU hours of the run where its steps are known.

    Nothing of a CPU that was not measured: they differ too much.
    """
    if not hardware.on_gpu and hardware.measured is None:
        return {}
    computing = computing_rate(hardware, compute_dtype(config.model, on_gpu=hardware.on_gpu))
    reading = reading_rate(hardware)
    num_sampling = layout.num_sampling
    if config.rollout.uses_servers and config.rollout.urls:
        # servers of other people are taken to be as many GPUs as names
        num_sampling = len(config.rollout.urls) * config.rollout.tensor_parallel
    times = step_times(
        config,
        work.shape,
        hardware,
        num_training=layout.num_training,
        num_sampling=num_sampling,
        shared=layout.shared,
    )
    moved, beside = dict(_waited_for(config, work)), dict(_beside(hardware, rows, work))
    bus = bus_rate(hardware)
    # copies that go on beside the computation take time where they are the longer of the two
    longest, waited_s = max([times.training_s, *(n.value for n in beside.values())]), sum(moved.values()) / bus.used
    used = f"at {computing.share:.0%} of that (assumed)"
    if longest > times.training_s:
        used += ", which ends before the copies that go on beside it"
    used += "".join(f", and {what}" for what in moved)
    times = replace(times, training_s=longest + waited_s)
    operations = ", ".join(training_operations(config, work.shape))
    sampler = (
        f"weights, keys and values are read at {reading.share:.0%} of the bandwidth, or computed with at "
        f"{computing.share:.0%}"
    )
    if config.rollout.shares_weights:
        sampler += "; PyTorch's own sampling is slower than that"
    numbers = {
        "products_tflops": _rate(computing, hardware, 1e-12),
        "memory_gbytes/s": _rate(reading, hardware, 1e-9),
        **({"bus_gbytes/s": _bus(bus, hardware)} if moved or beside.keys() - {"gathering_s"} else {}),
        "training_s": _derived(times.training_s, f"{operations} {used}"),
        **beside,
        "sampling_s": _derived(times.sampling_s, f"{sampler} (assumed)"),
        "step_s": _derived(times.step_s, "the longer phase" if times.overlap else "one phase after the other"),
    }
    if num_steps is not None:
        hours = times.step_s * num_steps / 3600
        gpus = layout.num_used
        numbers["run_hours"] = _derived(hours, f"{num_steps} step{'s' * (num_steps != 1)}")
        numbers["gpu_hours"] = _derived(hours * gpus, f"{gpus} GPU{'s' * (gpus > 1)}")
    return numbers


def _waited_for(config: Config, work: Work) -> Iterator[tuple[str, int]]:
    """What crosses the bus between host and device while nothing is computed, and the bytes of a step."""
    updates = config.train.updates_per_rollout
    if work.reference_visits:
        yield "the reference's weights from host memory", work.weight_bytes * work.shape.num_parameters
    if work.masters_on_host:
        # the update itself is as fast as the processor's memory, which is not known
        trained = sum(model.trained_parameters for model in work.models) // work.processes
        yield (
            "gradients to host memory and weights back",
            updates * trained * (work.trained_bytes + work.compute_bytes),
        )


def _derived(value: float, how: str) -> Number:
    return Number(value=value, origin="derived", how=how)


def _rate(rate: Rate, hardware: Hardware, unit: float) -> Number:
    if rate.is_measured and hardware.measured is not None:
        return Number(value=rate.best * unit, origin="measured", how=hardware.measured.told())
    return Number(value=rate.best * unit, origin="assumed", how="the maker's data sheet")


def _bus(rate: Rate, hardware: Hardware) -> Number:
    if rate.is_measured:
        return _rate(rate, hardware, 1e-9)
    return Number(value=rate.best * 1e-9, origin="assumed", how="between host and GPU, as is usual of PCIe 4.0")


def _beside(hardware: Hardware, rows: Rows, work: Work) -> Iterator[tuple[str, Number]]:
    """What goes on beside the computation: over the bus, and between GPUs where that was measured."""
    measured, bus = hardware.measured, bus_rate(hardware).used
    if measured is not None and measured.collective_bandwidth is not None and work.processes > 1:
        gathered = sum(
            2 * model.compute_bytes * model.shape.num_parameters + _REDUCED_BYTES * model.trained_parameters
            for model in work.models
        )
        seconds = rows.num_micro_batches * gathered / measured.collective_bandwidth
        yield "gathering_s", _derived(seconds, "two gathers and a reduction of every micro-batch, beside training")
    if work.parameters_on_host:
        visits = sum(
            2 * model.weight_bytes * model.shape.num_parameters + model.trained_bytes * model.trained_parameters
            for model in work.models
        )
        seconds = rows.num_micro_batches * visits / work.processes / bus
        how = "weights from host memory twice and gradients back, of every micro-batch, beside training"
        yield "visiting_s", _derived(seconds, how)
    if work.offload and hardware.on_gpu:
        moved = 2 * offloaded_bytes_per_token(work) * work.shape.layers * work.row_tokens * rows.num_micro_batches
        yield "offloading_s", _derived(moved / bus, "activations out and back, beside training")
