"""Micro-batches and times of a step, with the copies that `cohort.plan.timing` leaves out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cohort.config import Config
from cohort.plan.backward import offloaded_bytes_per_token
from cohort.plan.defaults import replicas, with_communication
from cohort.plan.hardware import Hardware, link_bandwidth
from cohort.plan.memory import CERTAIN, backward_bytes, persistent_parts, plan_memory
from cohort.plan.schedule import MicroBatchPlan, max_useful_budget, min_budget, plan_micro_batches
from cohort.plan.shape import ModelShape
from cohort.plan.timing import BUS_BANDWIDTH, StepTimes, step_times
from cohort.plan.workload import Workload, process_workload

_NIC_BANDWIDTH = 50e9  # bytes/s per GPU between nodes, assumed
_HOP_S, _NODE_HOP_S = 2e-6, 8e-6  # assumed latency of a hop of a ring, within a node and between nodes
_EQUAL = 1.01  # times within 1 % count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step of a run on given GPUs."""

    micro_batches: MicroBatchPlan
    workload: Workload  # per training process
    times: StepTimes
    blocking: Mapping[str, float]  # transfers that computation waits for: what is moved, and its bytes
    overlapped: Mapping[str, tuple[float, str]]  # others: seconds, and how they were found
    waits: bool  # whether computation takes less time than an overlapped transfer
    computing_s: float  # of training, as are the next two; without the pace of an earlier run
    communication_s: float  # between GPUs; overlaps with computation but for what copies of the model exchange

    @property
    def bound_by_communication(self) -> bool:
        """Whether communication takes longer than computation."""
        return self.communication_s > self.computing_s


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
    """Plan micro-batches and times of a step, with `auto` in these resolved as the run does.

    If it is bound by communication, `hardware.dp_replicate: auto` and `sync_each_micro_batch: auto` are what is fastest
    of what certainly fits, or of what is as fast, what communicates least.

    Args:
        config: configuration of the run.
        shape: shape of its model.
        hardware: type of GPU, the same for all.
        num_training: number of training GPUs.
        num_sampling: number of rollout GPUs.
        shared: whether these are the same GPUs, with servers that sleep during training.
        keeps_base: whether these keep their base model and free their KV cache only.
    """

    def plan(config: Config) -> PlannedStep:
        return _plan_step(
            config,
            shape,
            hardware,
            num_training=num_training,
            num_sampling=num_sampling,
            shared=shared,
            keeps_base=keeps_base,
        )

    def fits(config: Config) -> bool:
        return _certainly_fits(config, shape, hardware, num_training=num_training, shared=shared, keeps_base=keeps_base)

    simplest, *others = _communications(config, hardware, num_training)
    step = plan(simplest)
    if not step.bound_by_communication:
        return step
    steps = [step, *map(plan, filter(fits, others))]
    fastest_s = min(step.times.step_s for step in steps)
    equal = [step for step in steps if step.times.step_s <= fastest_s * _EQUAL]
    return min(equal, key=lambda step: step.communication_s)


def _communications(config: Config, hardware: Hardware, num_training: int) -> list[Config]:
    """Return the configuration with every value that `auto` may become, the simplest first."""
    keys = config.hardware
    per_node = _training_per_node(config, hardware, num_training)
    copies = [replicas(config)]
    resharded = keys.reshard_after_forward
    divides = isinstance(resharded, bool | str) or (per_node % resharded == 0 and resharded < per_node)
    if keys.dp_replicate == "auto" and num_training > per_node and num_training % per_node == 0 and divides:
        copies.append(num_training // per_node)
    syncs = [True, False] if keys.sync_each_micro_batch == "auto" else [keys.sync_each_micro_batch]
    if num_training == 1 or not hardware.on_gpu or config.model.parameter_offload:
        copies, syncs = copies[:1], syncs[:1]
    return [with_communication(config, number, sync) for number in copies for sync in syncs]


def _training_per_node(config: Config, hardware: Hardware, num_training: int) -> int:
    """Training GPUs of each node that trains: all of a node's, or the same number on every node."""
    keys = config.hardware
    if keys.rollout_gpus in ("auto", "shared") and keys.processes in ("auto", hardware.gpus_per_node):
        return hardware.gpus_per_node
    return max(1, num_training // hardware.nodes)


def _certainly_fits(
    config: Config, shape: ModelShape, hardware: Hardware, *, num_training: int, shared: bool, keeps_base: bool
) -> bool:
    """Whether training fits even if it needs somewhat more than planned; a budget that is measured may be smaller."""
    budget = config.train.micro_batch_tokens
    micro_batches = plan_micro_batches(config, num_training, min_budget(config) if budget == "auto" else budget)
    memory = plan_memory(process_workload(config, shape, hardware, micro_batches, shared=shared, keeps_base=keeps_base))
    training = [phase for phase in memory.phases if phase not in ("sampling", "publish")]
    return memory.peak_bytes <= hardware.gpu_memory_bytes and (
        max(map(memory.total, training)) <= CERTAIN * hardware.gpu_memory_bytes
    )


def _plan_step(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    *,
    num_training: int,
    num_sampling: int,
    shared: bool,
    keeps_base: bool,
) -> PlannedStep:
    """Plan a step with given `hardware.dp_replicate` and `sync_each_micro_batch`; see `plan_step`."""
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
    reducing_s, how = _reduction_between_copies(config, hardware, workload)
    # overlapped transfers cost time only if they take longer than the computation
    longest_s = max([computed.training_s, *(seconds for seconds, _ in overlapped.values())])
    training_s = longest_s + sum(blocking.values()) / BUS_BANDWIDTH + reducing_s
    communication_s = reducing_s + overlapped.get("gathering_s", (0.0, ""))[0]
    if reducing_s:
        overlapped["reducing_s"] = reducing_s, how
    return PlannedStep(
        micro_batches=micro_batches,
        workload=workload,
        times=replace(computed, training_s=training_s).at(hardware.pace),
        blocking=blocking,
        overlapped=overlapped,
        waits=longest_s > computed.training_s,
        computing_s=computed.training_s,
        communication_s=communication_s,
    )


def _largest_budget(
    config: Config, shape: ModelShape, hardware: Hardware, num_training: int, *, shared: bool, keeps_base: bool
) -> int:
    """Largest useful token budget that fits, as the run finds it; the smallest one if none fits."""

    def workload(tokens: int) -> Workload:
        micro_batches = plan_micro_batches(config, num_training, tokens)
        return process_workload(config, shape, hardware, micro_batches, shared=shared, keeps_base=keeps_base)

    def fits(tokens: int) -> bool:
        return backward_bytes(workload(tokens), persistent) <= hardware.gpu_memory_bytes

    low = min_budget(config)
    persistent = persistent_parts(workload(low))
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
    if workload.shards > 1 and hardware.on_gpu and not workload.parameters_on_host:
        per_node = _training_per_node(config, hardware, workload.processes)
        rate, how = _ring_rate(hardware, crosses=workload.shards > per_node)
        seconds = sum(
            _sharding_s(model, micro_batches.num_micro_batches, rate, _ring_latency_s(workload.shards, per_node))
            for model in workload.models
        )
        how = f"FSDP2's shards, overlapped with training; {how}"
        yield "gathering_s", config.train.updates_per_rollout * seconds, how


def _sharding_s(model: Workload, num_micro_batches: int, rate: float, latency_s: float) -> float:
    """Seconds of an update in which ranks gather weights and reduce gradients.

    Weights are gathered for forward and backward of each layer, or of the rest once.
    """
    others = (model.shards - 1) / model.shards
    gathers = 1 if model.reshard_after_forward is False else 2
    reductions = 1 if model.keeps_whole_gradients else num_micro_batches
    weights = gathers * model.compute_bytes * model.shape.num_parameters * num_micro_batches
    gradients = model.gradient_bytes * model.trained_parameters * reductions
    layers = model.shape.layers
    collectives = (gathers * layers + 1) * num_micro_batches + (layers + 1) * reductions
    return others * (weights + gradients) / rate + collectives * latency_s


def _reduction_between_copies(config: Config, hardware: Hardware, workload: Workload) -> tuple[float, str]:
    """Seconds per step in which copies of the model add up their gradients after the last pass, and how found."""
    copies = workload.dp_replicate
    if copies == 1 or not hardware.on_gpu:
        return 0.0, ""
    per_node = _training_per_node(config, hardware, workload.processes)
    crosses = workload.processes > per_node
    rate, how = _ring_rate(hardware, crosses=crosses, rings=workload.shards if crosses else 1)
    hop_s = _NODE_HOP_S if crosses else _HOP_S
    seconds = sum(
        2 * (copies - 1) / copies * model.gradient_bytes * model.trained_parameters / workload.shards / rate
        + 2 * (copies - 1) * hop_s * (model.shape.layers + 1)
        for model in workload.models
    )
    return config.train.updates_per_rollout * seconds, f"gradients of {copies} copies, after the last pass; {how}"


def _ring_latency_s(ranks: int, per_node: int) -> float:
    """Seconds for one trip around a ring of ranks."""
    between = (ranks - 1) // per_node
    return between * _NODE_HOP_S + (ranks - 1 - between) * _HOP_S


def _ring_rate(hardware: Hardware, *, crosses: bool, rings: int = 1) -> tuple[float, str]:
    """Bytes/s of a ring of ranks, and where they come from (docs/scaling.md).

    Args:
        hardware: type of GPU.
        crosses: whether it leaves the node.
        rings: number of rings that share a node's network.
    """
    link = link_bandwidth(hardware.gpu_name)
    rate, how = (link, "links by data sheet") if link is not None else (BUS_BANDWIDTH, "PCIe 4.0 x16 (assumed)")
    network = _NIC_BANDWIDTH * hardware.gpus_per_node / rings
    if crosses and network < rate:
        return network, "a NIC of 50 GB/s per GPU (assumed)"
    return rate, how
