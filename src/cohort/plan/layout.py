"""Where a run computes what: GPUs that train and that sample."""

from dataclasses import dataclass

from cohort.config import Config
from cohort.config.quantization import ONE_PROCESS
from cohort.errors import UserError
from cohort.plan.defaults import BYTES, compute_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.optimizer import check_spread
from cohort.plan.room import why_it_does_not_fit
from cohort.plan.shape import ModelShape
from cohort.plan.split import DoesNotFitError, split_gpus
from cohort.plan.timing import step_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Processes and GPUs of a run."""

    num_training: int  # GPUs that train, one process each
    num_sampling: int  # GPUs that sample; with `shared` the same ones; 0: somebody else's
    shared: bool
    reason: str
    problem: str | None = None  # why no split of these GPUs fits; the numbers are then those of shared ones

    @property
    def num_used(self) -> int:
        """GPUs that have something to do."""
        return self.num_training + self.num_sampling * (not self.shared)


def plan_layout(config: Config, shape: ModelShape, hardware: Hardware) -> Layout:
    """Who gets which GPUs.

    Raises:
        UserError: the configuration and the machines contradict each other.
    """
    processes, rollout = config.hardware.processes, config.rollout
    if processes != "auto" and processes > hardware.num_gpus:
        raise UserError(
            f"hardware.processes: {processes} is more than the {hardware.num_gpus} GPUs of this plan; give more with "
            f"--gpus or --nodes, or use hardware.processes: auto"
        )
    if not rollout.uses_servers:
        number = hardware.gpus_per_node if processes == "auto" else processes
        # a run on several nodes has as many processes on each
        number = min(number * hardware.nodes, hardware.num_gpus)
        why = "training processes sample" + ("" if processes == "auto" else f"; hardware.processes: {processes}")
        return Layout(num_training=number, num_sampling=number, shared=True, reason=why)
    if rollout.urls:
        number = hardware.num_gpus if processes == "auto" else processes
        return Layout(num_training=number, num_sampling=0, shared=False, reason="servers of rollout.urls sample")
    if not hardware.on_gpu:
        split = split_gpus(config, num_gpus=0, shape=shape, hardware=hardware)
        number = split.num_processes * hardware.nodes
        return Layout(num_training=number, num_sampling=len(split.server_gpus), shared=False, reason=split.reason)
    if hardware.nodes > 1:
        return _whole_nodes(config, shape, hardware)
    num_gpus = hardware.gpus_per_node
    try:
        split = split_gpus(config, num_gpus=num_gpus, shape=shape, hardware=hardware)
    except DoesNotFitError as error:
        return Layout(
            num_training=num_gpus, num_sampling=num_gpus, shared=True, reason="no split fits", problem=str(error)
        )
    return Layout(
        num_training=split.num_processes,
        num_sampling=sum(map(len, split.server_gpus)),
        shared=split.shared,
        reason=split.reason,
    )


def _whole_nodes(config: Config, shape: ModelShape, hardware: Hardware) -> Layout:
    """Some nodes train and the others sample, as `cohort launch slurm --rollout-nodes` has it.

    The fastest split of those that fit, and of all where none does.
    """
    per_node, rollout = hardware.gpus_per_node, config.rollout
    assert rollout.uses_servers
    tensor_parallel = rollout.tensor_parallel
    if tensor_parallel > per_node:
        raise UserError(f"rollout.tensor_parallel: {tensor_parallel} is more than the {per_node} GPUs of a node")
    numbers = range(1, hardware.nodes)
    training = {number: (hardware.nodes - number) * per_node for number in numbers}
    sampling = {number: number * (per_node // tensor_parallel) * tensor_parallel for number in numbers}
    fitting = [n for n in numbers if not why_it_does_not_fit(config, rollout, shape, hardware, training[n])]
    times = {
        n: step_times(config, shape, hardware, num_training=training[n], num_sampling=sampling[n]).step_s
        for n in fitting or numbers
    }
    number = min(times, key=lambda n: times[n])
    return Layout(
        num_training=training[number],
        num_sampling=sampling[number],
        shared=False,
        reason=f"--rollout-nodes {number} of {hardware.nodes} nodes is the fastest split",
    )


def check_host_memory(config: Config, *, on_gpu: bool, processes: int) -> None:
    """Compare what is to lie in host memory with where the run trains.

    Raises:
        UserError: a key has no effect, or does not work.
    """
    if not on_gpu and config.optim.offload:
        raise UserError(
            "optim.offload: true has no effect on a run on the CPU, whose optimizer is in host memory already; remove "
            "it"
        )
    if not on_gpu and config.model.parameter_offload:
        raise UserError(
            "model.parameter_offload: true has no effect on a run on the CPU, whose weights are in host memory "
            "already; remove it"
        )
    _check_average(config)
    if config.reference is None or config.reference.device != "cpu":
        return
    if not on_gpu:
        raise UserError(
            "reference.device: cpu has no effect on a run on the CPU, whose weights are in host memory already; "
            "remove it"
        )
    if processes > 1:
        raise UserError(
            f"reference.device: cpu works in one process, and this run has {processes}, over which the "
            f"reference is spread already; use reference.device: auto"
        )


def _check_average(config: Config) -> None:
    """A reference that is an average is narrow with `optim.offload`, and what is added to it may be small.

    Raises:
        UserError: it would be lost.
    """
    reference, wide = config.reference, config.model.dtype
    computed = compute_dtype(config.model, on_gpu=True)
    if reference is None or reference.mix in (None, 1) or not config.optim.offload or BYTES[computed] >= BYTES[wide]:
        return
    raise UserError(
        f"reference.mix: {reference.mix:g} with optim.offload: true: the reference is kept in {computed}, in which an "
        f"average over refreshes loses what is small; use reference.mix: 1, model.compute_dtype: {wide}, or "
        f"model.parameter_offload: true in place of optim.offload"
    )


def check_processes(config: Config, processes: int) -> None:
    """Compare the configuration with the number of training processes, before any is started.

    Raises:
        UserError: a key has no effect with so many, or cannot be spread over them.
    """
    check_spread(config.optim, processes)
    check_resharding(config, processes)
    check_undivided(config, processes=processes)


def check_resharding(config: Config, processes: int) -> None:
    """Compare `hardware.reshard_after_forward` with the processes that layers are gathered from.

    Raises:
        UserError: it has no effect, or does not divide them.
    """
    wanted = config.hardware.reshard_after_forward
    if wanted == "auto":
        return
    if processes == 1:
        raise UserError(
            f"hardware.reshard_after_forward: {str(wanted).lower()} has no effect on one process, whose weights are "
            f"whole; remove it"
        )
    if not isinstance(wanted, bool) and (wanted >= processes or processes % wanted):
        divisors = [str(n) for n in range(2, processes) if processes % n == 0]
        raise UserError(
            f"hardware.reshard_after_forward: {wanted} has to divide the {processes} training processes, and be less "
            f"than them; use {', '.join([*divisors, 'true'])} or false"
        )


def check_undivided(config: Config, *, processes: int) -> None:
    """Compare quantized weights with the number of training processes.

    Raises:
        UserError: they would have to be spread.
    """
    for field, kind in config.quantized() if processes > 1 else ():
        raise UserError(f"{field}: {kind} {ONE_PROCESS}. This run would have {processes}")
