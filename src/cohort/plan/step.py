"""Micro-batches and times of a step, with the copies that `cohort.plan.timing` leaves out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cohort.config import Config
from cohort.plan.backward import offloaded_bytes_per_token
from cohort.plan.hardware import Hardware, link_bandwidth
from cohort.plan.memory import plan_memory
from cohort.plan.schedule import MicroBatchPlan, max_useful_budget, min_budget, plan_micro_batches
from cohort.plan.shape import ModelShape
from cohort.plan.timing import BUS_BANDWIDTH, StepTimes, step_times
from cohort.plan.workload import Workload, process_workload

_NIC_BANDWIDTH = 50e9  # bytes/s per GPU between nodes, assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step of a run on given GPUs."""

    micro_batches: MicroBatchPlan
    workload: Workload  # per training process
    times: StepTimes
    blocking: Mapping[str, float]  # transfers that computation waits for: what is moved, and its bytes
    overlapped: Mapping[str, tuple[float, str]]  # others: seconds, and how they were found
    waits: bool  # whether computation takes less time than an overlapped transfer


def plan_step(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    *,
    num_training: int,
    num_sampling: int,
    shared: bool = False,
    keeps_base: bool = False,
) -> PlannedStep:
    """Plan micro-batches and times of a step, with `train.micro_batch_tokens: auto` resolved as the run does.

    Args:
        config: configuration of the run.
        shape: shape of its model.
        hardware: type of GPU, the same for all.
        num_training: number of training GPUs.
        num_sampling: number of rollout GPUs.
        shared: whether these are the same GPUs, with servers that sleep during training.
        keeps_base: whether these keep their base model and free their KV cache only.
    """
    budget = config.train.micro_batch_tokens
    if budget == "auto":
        budget = _largest_budget(config, shape, hardware, num_training, shared=shared, keeps_base=keeps_base)
    micro_batches = plan_micro_batches(config, num_training, budget)
    workload = process_workload(config, shape, hardware, micro_batches, shared=shared, keeps_base=keeps_base)
    if config.rollout.uses_servers and config.rollout.urls:
        # external servers: assume tensor_parallel GPUs per URL
        num_sampling = len(config.rollout.urls) * config.rollout.tensor_parallel
    computed = step_times(
        config,
        shape,
        replace(hardware, pace=None),
        num_training=num_training,
        num_sampling=num_sampling,
        shared=shared,
    )
    blocking = dict(_blocking_transfers(config, micro_batches, workload))
    overlapped = {
        name: (seconds, how) for name, seconds, how in _overlapped_transfers(config, hardware, micro_batches, workload)
    }
    # overlapped transfers cost time only if they take longer than the computation
    longest_s = max([computed.training_s, *(seconds for seconds, _ in overlapped.values())])
    training_s = longest_s + sum(blocking.values()) / BUS_BANDWIDTH
    return PlannedStep(
        micro_batches=micro_batches,
        workload=workload,
        times=replace(computed, training_s=training_s).at(hardware.pace),
        blocking=blocking,
        overlapped=overlapped,
        waits=longest_s > computed.training_s,
    )


def _largest_budget(
    config: Config, shape: ModelShape, hardware: Hardware, num_training: int, *, shared: bool, keeps_base: bool
) -> int:
    """Largest useful token budget that fits, as the run finds it; the smallest one if none fits."""

    def fits(tokens: int) -> bool:
        micro_batches = plan_micro_batches(config, num_training, tokens)
        workload = process_workload(config, shape, hardware, micro_batches, shared=shared, keeps_base=keeps_base)
        return plan_memory(workload).total("backward") <= hardware.gpu_memory_bytes

    low = min_budget(config)
    high = max(low, max_useful_budget(config, num_training))
    return largest_number(fits, low, high, tolerance=16) or low


def largest_number(fits: Callable[[int], bool], low: int, high: int, *, tolerance: int = 1) -> int | None:
    """Bisect for the largest fitting number in [low, high], up to `tolerance`; None if `low` does not fit."""
    if high < low or not fits(low):
        return None
    if fits(high):
        return high
    while high - low > tolerance:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _blocking_transfers(
    config: Config, micro_batches: MicroBatchPlan, workload: Workload
) -> Iterator[tuple[str, float]]:
    """Yield transfers over the bus that computation waits for, with their bytes per step."""
    updates = config.train.updates_per_rollout
    if workload.reference_on_host:
        yield "the reference's weights from host memory", workload.weight_bytes * workload.shape.num_parameters
    if workload.masters_on_host:
        # the update itself is bound by the CPU's memory bandwidth, which is unknown
        trained = sum(model.trained_parameters for model in workload.models) // workload.shards
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
            micro_batches.num_micro_batches * visits / workload.shards,
        )


def _overlapped_transfers(
    config: Config, hardware: Hardware, micro_batches: MicroBatchPlan, workload: Workload
) -> Iterator[tuple[str, float, str]]:
    """Yield transfers that overlap with computation: activations over the bus, shards between GPUs."""
    if workload.offload and hardware.on_gpu:
        moved = 2 * offloaded_bytes_per_token(workload) * workload.packed_tokens * micro_batches.num_micro_batches
        yield "offloading_s", moved / BUS_BANDWIDTH, "activations out and back, overlapped with training"
    if workload.processes > 1 and hardware.on_gpu and not workload.parameters_on_host:
        rate, how = _shard_rate(hardware, workload.processes)
        shards = sum(map(_shard_bytes, workload.models)) * (workload.processes - 1) / workload.processes
        passes = micro_batches.num_micro_batches * config.train.updates_per_rollout
        yield "gathering_s", passes * shards / rate, f"FSDP2's shards, overlapped with training; {how}"


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
