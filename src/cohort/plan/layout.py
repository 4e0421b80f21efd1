"""Assign GPUs to training and rollouts, and check the configuration against the result."""

from dataclasses import dataclass

from cohort.config import Config
from cohort.config.model import ONE_PROCESS
from cohort.errors import UserError
from cohort.plan.defaults import BYTES, compute_dtype, replicas
from cohort.plan.hardware import Hardware
from cohort.plan.shape import ModelShape
from cohort.plan.split import (
    NoSplitFitsError,
    check_attention_heads,
    check_server_size,
    memory_shortfall,
    split_gpus,
    split_nodes_alike,
)
from cohort.plan.state_memory import check_optimizer_sharding
from cohort.plan.step import plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """Number of training and rollout GPUs of a run."""

    num_training: int  # training GPUs, one process each
    num_sampling: int  # rollout GPUs; with `shared` the same ones; 0: external servers
    shared: bool
    keeps_base: bool = False  # see `GpuSplit`
    rollout_nodes: int = 0  # nodes that only sample; 0: none, or servers beside the training processes
    reason: str
    problem: str | None = None  # why no split fits; the numbers are then those of shared GPUs

    @property
    def num_used(self) -> int:
        """Number of GPUs in use."""
        return self.num_training + self.num_sampling * (not self.shared)

    @property
    def in_words(self) -> str:
        """GPUs that train and sample, such as "3 + 1" or "4 shared"."""
        if self.shared:
            return f"{self.num_training} shared" if self.num_training > 1 else "1"
        return f"{self.num_training} + {self.num_sampling or 'external'}"


def plan_layout(config: Config, shape: ModelShape, hardware: Hardware) -> GpuLayout:
    """Assign GPUs to training and rollouts.

    Raises:
        UserError: configuration and hardware contradict each other.
    """
    processes, rollout = config.hardware.processes, config.rollout
    if processes != "auto" and processes > hardware.num_gpus:
        raise UserError(
            f"hardware.processes: {processes} exceeds the {hardware.num_gpus} GPUs of this plan; raise --gpus or "
            f"--nodes, or use hardware.processes: auto"
        )
    if not rollout.uses_servers:
        number = hardware.gpus_per_node if processes == "auto" else processes
        # the same number of processes on every node
        number = min(number * hardware.nodes, hardware.num_gpus)
        why = "training processes sample" + ("" if processes == "auto" else f"; hardware.processes: {processes}")
        return GpuLayout(num_training=number, num_sampling=number, shared=True, reason=why)
    if rollout.urls:
        number = hardware.num_gpus if processes == "auto" else processes
        return GpuLayout(num_training=number, num_sampling=0, shared=False, reason="servers of rollout.urls sample")
    if hardware.on_gpu and hardware.nodes > 1:
        if config.hardware.rollout_gpus == "auto" and processes in ("auto", hardware.gpus_per_node):
            return _split_nodes(config, shape, hardware)
        return _split_each_node(config, shape, hardware)
    num_gpus = hardware.gpus_per_node if hardware.on_gpu else 0
    try:
        split = split_gpus(config, num_gpus=num_gpus, shape=shape, hardware=hardware)
    except NoSplitFitsError as error:
        return GpuLayout(
            num_training=num_gpus, num_sampling=num_gpus, shared=True, reason="no split fits", problem=str(error)
        )
    return GpuLayout(
        num_training=split.num_processes * hardware.nodes,
        num_sampling=sum(map(len, split.server_gpus)) or len(split.server_gpus),  # on CPU the number of servers
        shared=split.shared,
        keeps_base=split.keeps_base,
        reason=split.reason,
    )


def _split_nodes(config: Config, shape: ModelShape, hardware: Hardware) -> GpuLayout:
    """Assign whole nodes to training or rollouts, as `cohort launch slurm --rollout-nodes` does.

    Takes the fastest split among those that fit, or among all if none fits.
    """
    assert config.rollout.uses_servers
    per_node, tensor_parallel = hardware.gpus_per_node, config.rollout.tensor_parallel
    check_server_size(tensor_parallel, per_node)
    servers, per_server_node = config.rollout.servers, per_node // tensor_parallel
    numbers = [n for n in range(1, hardware.nodes) if servers in ("auto", n * per_server_node)]
    if not numbers:
        raise UserError(
            f"rollout.servers: {servers} does not match any number of rollout nodes, with {per_server_node} servers "
            f"each; use auto, or at most {(hardware.nodes - 1) * per_server_node} in multiples of {per_server_node}"
        )
    check_attention_heads(config.rollout, shape)
    training = {number: (hardware.nodes - number) * per_node for number in numbers}
    sampling = {number: number * per_node for number in numbers}
    fitting = [n for n in numbers if not memory_shortfall(config, shape, hardware, training[n])]
    times = {
        n: plan_step(config, shape, hardware, num_training=training[n], num_sampling=sampling[n]).times.step_s
        for n in fitting or numbers
    }
    number = min(times, key=lambda n: times[n])
    return GpuLayout(
        num_training=training[number],
        num_sampling=sampling[number],
        shared=False,
        rollout_nodes=number,
        reason=f"--rollout-nodes {number} of {hardware.nodes} nodes is the fastest split",
    )


def _split_each_node(config: Config, shape: ModelShape, hardware: Hardware) -> GpuLayout:
    """Assign the same GPUs of every node to training and rollouts, as `cohort launch slurm` does for given numbers."""
    nodes = hardware.nodes
    split = split_nodes_alike(config, nodes=nodes, gpus_per_node=hardware.gpus_per_node, shape=shape, hardware=hardware)
    return GpuLayout(
        num_training=split.num_processes * nodes,
        num_sampling=sum(map(len, split.server_gpus)) * nodes,
        shared=False,
        reason=f"on each of {nodes} nodes, {split.reason}",
    )


def check_cpu_offload(config: Config, *, on_gpu: bool, processes: int) -> None:
    """Check CPU offload settings against the training device.

    Raises:
        UserError: a key has no effect or is unsupported.
    """
    if not on_gpu and config.optim.offload:
        raise UserError(
            "optim.offload: true has no effect on CPU, where the optimizer is in host memory already; remove it"
        )
    if not on_gpu and config.model.parameter_offload:
        raise UserError(
            "model.parameter_offload: true has no effect on CPU, where weights are in host memory already; remove it"
        )
    _check_averaged_reference(config)
    if config.reference is None or config.reference.device != "cpu":
        return
    if not on_gpu:
        raise UserError(
            "reference.device: cpu has no effect on CPU, where weights are in host memory already; remove it"
        )
    if processes > 1:
        raise UserError(
            f"reference.device: cpu requires one training process, but this run shards the reference over "
            f"{processes}; use reference.device: auto"
        )


def _check_averaged_reference(config: Config) -> None:
    """Refuse an averaged reference that would lose small updates in a narrow dtype (`optim.offload`).

    Raises:
        UserError: `reference.mix` is below 1 and the reference is narrower than the weights.
    """
    reference, wide = config.reference, config.model.dtype
    computed = compute_dtype(config.model, on_gpu=True)
    if reference is None or reference.mix in (None, 1) or not config.optim.offload or BYTES[computed] >= BYTES[wide]:
        return
    raise UserError(
        f"reference.mix: {reference.mix:g} with optim.offload: true keeps the reference in {computed}, where the "
        f"average loses small updates; use reference.mix: 1, model.compute_dtype: {wide}, or "
        f"model.parameter_offload: true instead of optim.offload"
    )


def check_processes(config: Config, processes: int) -> None:
    """Check the configuration against the number of training processes, before any is started.

    Raises:
        UserError: a key has no effect with this number or cannot be sharded.
    """
    check_optimizer_sharding(config.optim, processes)
    check_replicas(config, processes)
    check_resharding(config, processes)
    for field, kind in config.quantized() if processes > 1 else ():
        raise UserError(f"{field}: {kind} {ONE_PROCESS} (this run would have {processes})")


def check_replicas(config: Config, processes: int) -> None:
    """Check `hardware.dp_replicate` and `sync_each_micro_batch` against the number of training processes.

    Raises:
        UserError: the one does not divide the number, or the other has no effect on one process.
    """
    wanted = replicas(config)
    if processes == 1 and config.hardware.sync_each_micro_batch is False:
        raise UserError(
            "hardware.sync_each_micro_batch: false has no effect on one process, whose gradients are not reduced; "
            "remove it"
        )
    if processes % wanted:
        divisors = [n for n in range(1, processes + 1) if processes % n == 0]
        near = [max(n for n in divisors if n < wanted), *[n for n in divisors if n > wanted][:1]]
        raise UserError(
            f"hardware.dp_replicate: {wanted} must divide the {processes} training process{'es' * (processes > 1)}; "
            f"use {' or '.join(map(str, near))}"
        )


def check_resharding(config: Config, processes: int) -> None:
    """Check `hardware.reshard_after_forward` against the number of training processes.

    Raises:
        UserError: it has no effect or does not divide the number.
    """
    wanted = config.hardware.reshard_after_forward
    if wanted == "auto":
        return
    if processes == 1:
        raise UserError(
            f"hardware.reshard_after_forward: {str(wanted).lower()} has no effect on one process, whose weights are "
            f"not sharded; remove it"
        )
    shared = processes // replicas(config)
    if not isinstance(wanted, bool) and (wanted >= shared or shared % wanted):
        divisors = [str(n) for n in range(2, shared) if shared % n == 0]
        of_copy = " that share a copy of the model (hardware.dp_replicate)" if shared < processes else ""
        raise UserError(
            f"hardware.reshard_after_forward: {wanted} must be a proper divisor of the {shared} training "
            f"processes{of_copy}; use {', '.join([*divisors, 'true'])} or false"
        )
