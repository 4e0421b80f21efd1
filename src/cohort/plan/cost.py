"""Predicted step times and run cost, with the origin of every number.

Good enough to see which phase dominates and what a change is worth; trust a run's own metrics over it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from cohort.config import Config
from cohort.plan.backward import offloaded_bytes_per_token
from cohort.plan.defaults import compute_dtype
from cohort.plan.hardware import Hardware, link_bandwidth
from cohort.plan.layout import GpuLayout
from cohort.plan.schedule import MicroBatchPlan
from cohort.plan.timing import BUS_BANDWIDTH, Rate, compute_rate, memory_rate, step_times, training_operations
from cohort.plan.workload import Workload

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


_NIC_BANDWIDTH = 50e9  # bytes/s per GPU between nodes, assumed
_PUBLISHING = "weights at the speed of the bus, with sleep and wake-up of servers on shared GPUs (assumed)"


def plan_timing(
    config: Config,
    hardware: Hardware,
    layout: GpuLayout,
    micro_batches: MicroBatchPlan,
    workload: Workload,
    *,
    num_steps: int | None,
) -> dict[str, PlannedValue]:
    """Predict seconds per phase, with the rates used, and GPU hours if the number of steps is known.

    Returns nothing for a CPU without an earlier run: CPUs differ too much.
    """
    if not hardware.on_gpu and hardware.pace is None:
        return {}
    pace = hardware.pace
    computing = compute_rate(hardware, compute_dtype(config.model, on_gpu=hardware.on_gpu))
    reading = memory_rate(hardware)
    num_sampling = layout.num_sampling
    if config.rollout.uses_servers and config.rollout.urls:
        # external servers: assume tensor_parallel GPUs per URL
        num_sampling = len(config.rollout.urls) * config.rollout.tensor_parallel
    times = step_times(
        config,
        workload.shape,
        replace(hardware, pace=None),
        num_training=layout.num_training,
        num_sampling=num_sampling,
        shared=layout.shared,
    )
    blocking = dict(_blocking_transfers(config, micro_batches, workload))
    overlapped = dict(_overlapped_transfers(config, hardware, micro_batches, workload))
    # overlapped transfers cost time only if they take longer than the computation
    longest_s = max([times.training_s, *(n.value for n in overlapped.values())])
    used = f"at {computing.utilization:.0%} of that (assumed)"
    if longest_s > times.training_s:
        used += ", less than the overlapped copies"
    used += "".join(f", and {what}" for what in blocking)
    times = replace(times, training_s=longest_s + sum(blocking.values()) / BUS_BANDWIDTH).at(pace)
    operations = ", ".join(training_operations(config, workload.shape))
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


def _blocking_transfers(
    config: Config, micro_batches: MicroBatchPlan, workload: Workload
) -> Iterator[tuple[str, float]]:
    """Yield transfers over the bus that computation waits for, with their bytes per step."""
    updates = config.train.updates_per_rollout
    if workload.reference_on_host:
        yield "the reference's weights from host memory", workload.weight_bytes * workload.shape.num_parameters
    if workload.masters_on_host:
        # the update itself is bound by the CPU's memory bandwidth, which is unknown
        trained = sum(model.trained_parameters for model in workload.models) // workload.processes
        yield (
            "gradients to host memory and weights back",
            updates * trained * (workload.trained_bytes + workload.compute_bytes),
        )
    if workload.parameters_on_host:
        # FSDP2 waits for gradients, which go to unpinned memory, and on one process copies weights in the same stream
        visits = sum(
            2 * model.weight_bytes * model.shape.num_parameters + model.gradient_bytes * model.trained_parameters
            for model in workload.models
        )
        yield (
            "weights from host memory twice and gradients back per micro-batch",
            micro_batches.num_micro_batches * visits / workload.processes,
        )


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


def _overlapped_transfers(
    config: Config, hardware: Hardware, micro_batches: MicroBatchPlan, workload: Workload
) -> Iterator[tuple[str, PlannedValue]]:
    """Yield transfers that overlap with computation: activations over the bus, shards between GPUs."""
    if workload.offload and hardware.on_gpu:
        moved = (
            2
            * offloaded_bytes_per_token(workload)
            * workload.shape.layers
            * workload.packed_tokens
            * micro_batches.num_micro_batches
        )
        yield "offloading_s", _derived(moved / BUS_BANDWIDTH, "activations out and back, overlapped with training")
    if workload.processes > 1 and hardware.on_gpu and not workload.parameters_on_host:
        rate, how = _shard_rate(hardware, workload.processes)
        shards = sum(map(_shard_bytes, workload.models)) * (workload.processes - 1) / workload.processes
        passes = micro_batches.num_micro_batches * config.train.updates_per_rollout
        yield "gathering_s", _derived(passes * shards / rate, f"FSDP2's shards, overlapped with training; {how}")


def _shard_bytes(model: Workload) -> int:
    """Bytes of weights for forward and backward, and of gradients, that the ranks exchange per micro-batch."""
    gathers = 1 if model.reshard_after_forward is False else 2
    return gathers * model.compute_bytes * model.shape.num_parameters + model.gradient_bytes * model.trained_parameters


def _shard_rate(hardware: Hardware, processes: int) -> tuple[float, str]:
    """Bytes/s of a ring of ranks, and where they come from (docs/scaling.md)."""
    link = link_bandwidth(hardware.gpu_name)
    rate, how = (link, "links by data sheet") if link is not None else (BUS_BANDWIDTH, "PCIe 4.0 x16 (assumed)")
    network = _NIC_BANDWIDTH * hardware.gpus_per_node
    if processes > hardware.gpus_per_node and network < rate:
        return network, "a NIC of 50 GB/s per GPU (assumed)"
    return rate, how
