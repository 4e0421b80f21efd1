"""Split a machine's GPUs between training and rollout servers, so that both fit.

Explicit numbers are kept, and `auto` gets the remaining GPUs. If both sides are `auto`, take what has the shortest
predicted step (`cohort.plan.timing`) among what fits: a split, or all GPUs for both in turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.config import Config, ServersConfig
from cohort.errors import UserError
from cohort.plan.defaults import BYTES, server_memory_utilization, serving_dtype, with_checkpointing
from cohort.plan.hardware import Hardware
from cohort.plan.memory import CERTAIN, PHASES, plan_memory
from cohort.plan.schedule import group_budget, min_budget, plan_micro_batches
from cohort.plan.shape import ModelShape, preset_shape
from cohort.plan.step import plan_step
from cohort.plan.timing import DEFAULT_GPU, digits
from cohort.plan.workload import process_workload, served_base_bytes

_KV_SHARE = 0.2  # of a server's GPU, reserved for the KV cache


def memory_shortfall(
    config: Config, shape: ModelShape, hardware: Hardware, num_training: int, *, shared: bool = False
) -> str | None:
    """Say what does not fit into GPU memory; None if everything does.

    Training is checked with the smallest token budget, since a run shrinks its budget as needed, and with the most
    saving checkpointing if `model.gradient_checkpointing` is `auto`.

    Args:
        config: configuration of a run that uses servers.
        shape: shape of its model.
        hardware: type of GPU.
        num_training: number of training GPUs.
        shared: whether servers sleep on the training GPUs during training.
    """
    memory, rollout = hardware.gpu_memory_bytes, config.rollout
    assert rollout.uses_servers
    if config.model.gradient_checkpointing == "auto":
        config = with_checkpointing(config, True)
    micro_batches = plan_micro_batches(config, num_training, min_budget(config))
    needed = plan_memory(process_workload(config, shape, hardware, micro_batches, shared=shared))
    if needed.peak_bytes > memory:
        return (
            f"training on {num_training} GPU{'s' * (num_training > 1)} needs {needed.peak_bytes / 1e9:.3g} GB per "
            f"GPU in {PHASES[needed.peak_phase]}, of {memory / 1e9:.3g} GB"
        )
    weights = BYTES[serving_dtype(config, on_gpu=True)] * shape.num_parameters / rollout.tensor_parallel
    room = max(0.0, server_memory_utilization(rollout, shared=shared) - _KV_SHARE) * memory
    if weights > room:
        return (
            f"a server's weights need {weights / 1e9:.3g} GB per GPU with rollout.tensor_parallel: "
            f"{rollout.tensor_parallel}, of {room / 1e9:.3g} GB available for them"
        )
    return None


def check_attention_heads(rollout: ServersConfig, shape: ModelShape | None) -> None:
    """Check that the GPUs of a server divide the attention heads of the model, if its shape is known.

    Raises:
        UserError: they do not.
    """
    size = rollout.tensor_parallel
    if shape is not None and shape.num_heads % size:
        raise UserError(
            f"rollout.tensor_parallel: {size} must divide the {shape.num_heads} attention heads of {shape.name}; use "
            f"{_near_divisors(shape.num_heads, size)}"
        )


def base_fits(config: Config, shape: ModelShape, hardware: Hardware, num_training: int) -> bool:
    """Whether the base model of each server fits beside training on its GPU, where it then need not be moved.

    False if in doubt: for an approximate shape, and experts (a server's space for their adapters is not planned). With
    `train.micro_batch_tokens: auto`, there must be room for micro-batches of one group.

    Args:
        config: configuration of a run whose servers share the training GPUs.
        shape: shape of its model.
        hardware: type of GPU.
        num_training: number of training GPUs.
    """
    rollout, wanted = config.rollout, config.train.micro_batch_tokens
    assert rollout.uses_servers
    if config.model.adapter is None or not rollout.can_keep_base:
        return False
    if shape.approximate or shape.experts > 1 or not hardware.on_gpu:
        return False
    budget = max(min_budget(config), group_budget(config)) if wanted == "auto" else wanted
    micro_batches = plan_micro_batches(config, num_training, budget)
    workload = process_workload(config, shape, hardware, micro_batches, shared=True, keeps_base=True)
    memory = plan_memory(workload)
    # an awake server has its share of the GPU, of which the base is a part, in any case
    training = memory.phases.keys() - {"sampling", "publish"}
    return max(map(memory.total, training)) <= CERTAIN * hardware.gpu_memory_bytes


# Used for an unknown model or GPU: the fastest split depends little on either.
_STAND_IN_SHAPE = "llama3-1b"
_STAND_IN_MEMORY = 1 << 60


class NoSplitFitsError(UserError):
    """No split of the GPUs fits into their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """GPUs of each training process and server, as indices into the visible devices."""

    num_processes: int  # training processes
    training_gpus: tuple[int, ...]  # one per training process; empty on CPU
    server_gpus: tuple[tuple[int, ...], ...]  # per server; empty on CPU
    shared: bool  # servers and training processes use the same GPUs in turn
    keeps_base: bool = False  # with an adapter: servers free their KV cache during training, but not the base model
    reason: str  # the choice and why, for the user

    def servers_beside(self, slots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """GPUs of each server if only these indices into `training_gpus` train.

        No server stays on a shared GPU that does not train: no rank would put it to sleep.
        """
        return tuple(gpus for gpus in self.server_gpus if not self.shared or set(gpus) <= set(slots))


def count_processes(config: Config, num_gpus: int) -> int:
    """Resolve `hardware.processes` on a machine without servers of its own: by default one per GPU, or one on CPU.

    Raises:
        UserError: the machine has GPUs, but fewer than processes.
    """
    processes = config.hardware.processes
    if processes == "auto":
        return max(1, num_gpus)
    if 0 < num_gpus < processes:
        raise UserError(
            f"hardware.processes: {processes} exceeds the machine's {num_gpus} GPUs (one per process); use at most "
            f"{num_gpus}, or auto"
        )
    return processes


def split_gpus(config: Config, *, num_gpus: int, shape: ModelShape | None, hardware: Hardware | None) -> GpuSplit:
    """Split a machine's GPUs between training and the servers that the run starts.

    Args:
        config: configuration of a run that uses servers, without `rollout.urls`.
        num_gpus: number of GPUs of this machine; 0: run on CPU.
        shape: shape of the model; None if unknown, as before its download.
        hardware: type of GPU; None if unknown. Without shape or hardware, memory is not checked, and servers keep no
            base model.

    Raises:
        UserError: the configuration contradicts itself or the machine.
        NoSplitFitsError: no split fits.
    """
    rollout = config.rollout
    assert rollout.uses_servers and not rollout.urls
    check_attention_heads(rollout, shape)
    if num_gpus == 0:
        return _cpu_split(config, rollout)
    processes, wanted = config.hardware.processes, config.hardware.rollout_gpus
    count_processes(config, num_gpus)  # raises if there are too few GPUs
    if wanted == "shared":
        return _shared(config, rollout, num_gpus, "hardware.rollout_gpus: shared", shape, hardware)
    if wanted == "auto" and processes in (num_gpus, "auto") and num_gpus == 1:
        return _shared(config, rollout, 1, "there is only one GPU", shape, hardware)
    if wanted == "auto" and processes == num_gpus:
        why = f"hardware.processes: {processes} leaves no dedicated rollout GPU"
        return _shared(config, rollout, num_gpus, why, shape, hardware)
    if wanted == "auto" and processes == "auto":
        return _fastest_split(config, rollout, num_gpus, shape, hardware)
    num_sampling = _num_sampling(config, rollout, num_gpus)
    num_training = num_gpus - num_sampling if processes == "auto" else int(processes)
    kept = " and ".join(
        f"hardware.{key}: {value}"
        for key, value in (("processes", processes), ("rollout_gpus", wanted))
        if value != "auto"
    )
    return _separate_split(rollout, num_gpus, num_training, num_sampling, kept)


def split_nodes_alike(
    config: Config, *, nodes: int, gpus_per_node: int, shape: ModelShape | None, hardware: Hardware | None
) -> GpuSplit:
    """Split the GPUs of each of several nodes in the same way, with servers beside the ranks.

    Args:
        config: configuration of a run that uses servers, and sets `hardware.rollout_gpus` or `hardware.processes`.
        nodes: number of nodes.
        gpus_per_node: GPUs of every node.
        shape: as in `split_gpus`.
        hardware: as in `split_gpus`.

    Raises:
        UserError: as `split_gpus`, or servers and ranks would share GPUs.
    """
    if config.hardware.rollout_gpus == "shared":
        raise UserError(
            f"hardware.rollout_gpus: shared with --nodes: {nodes}: servers can only share the GPUs of one node; use "
            f"--nodes 1, hardware.rollout_gpus=1 (of every node), or hardware.rollout_gpus=auto with whole rollout "
            f"nodes (`cohort launch slurm --rollout-nodes 1`)"
        )
    return split_gpus(config, num_gpus=gpus_per_node, shape=shape, hardware=hardware)


def check_server_size(size: int, gpus_per_node: int) -> None:
    """Check that the servers of a rollout node use all of its GPUs.

    Raises:
        UserError: they do not.
    """
    if gpus_per_node % size:
        fitting = [n for n in range(1, gpus_per_node + 1) if gpus_per_node % n == 0]
        near = sorted({max([n for n in fitting if n < size]), min([n for n in fitting if n > size] or [gpus_per_node])})
        raise UserError(
            f"rollout.tensor_parallel: {size} does not divide the {gpus_per_node} GPUs of a rollout node, and a server "
            f"cannot span nodes; use {_join_or(near)}"
        )


def _cpu_split(config: Config, rollout: ServersConfig) -> GpuSplit:
    if config.hardware.rollout_gpus != "auto":
        raise UserError(
            f"hardware.rollout_gpus: {config.hardware.rollout_gpus} has no effect on CPU, which training and servers "
            f"share; remove it"
        )
    if rollout.tensor_parallel != 1:
        raise UserError(f"rollout.tensor_parallel: {rollout.tensor_parallel} requires GPUs; use 1 on CPU")
    num_servers = 1 if rollout.servers == "auto" else rollout.servers
    num_processes = 1 if config.hardware.processes == "auto" else config.hardware.processes
    return GpuSplit(
        num_processes=num_processes,
        training_gpus=(),
        server_gpus=((),) * num_servers,
        shared=False,
        reason=f"{_count(num_processes, 'process')} and {_count(num_servers, rollout.server_name)} share the CPU",
    )


def _shared(
    config: Config,
    rollout: ServersConfig,
    num_gpus: int,
    why: str,
    shape: ModelShape | None,
    hardware: Hardware | None,
) -> GpuSplit:
    """Train on every GPU, with one server on each `rollout.tensor_parallel` of them.

    Raises:
        UserError: the configuration requires another number of processes or servers, or samples ahead, or the GPUs do
            not divide into servers.
    """
    size = rollout.tensor_parallel
    if rollout.samples_ahead:
        raise UserError(
            f"rollout.max_staleness: {rollout.max_staleness} needs dedicated rollout GPUs, and this layout shares them "
            f"({why}); use max_staleness: 0, or set hardware.rollout_gpus"
        )
    if num_gpus % size:
        raise UserError(
            f"rollout.tensor_parallel: {size} with shared GPUs ({why}): it must divide their number, which is "
            f"{num_gpus}; use {_near_divisors(num_gpus, size)}, or select GPUs with CUDA_VISIBLE_DEVICES"
        )
    each = "every GPU has" if size == 1 else f"every {size} GPUs (rollout.tensor_parallel) have"
    for field, value, number, rule in (
        ("hardware.processes", config.hardware.processes, num_gpus, "every GPU has one training process"),
        ("rollout.servers", rollout.servers, num_gpus // size, f"{each} one server"),
    ):
        if value not in ("auto", number):
            raise UserError(
                f"{field}: {value} with shared GPUs: {rule}, and there are {num_gpus}; use auto or {number}, a "
                f"number for hardware.rollout_gpus, or select GPUs with CUDA_VISIBLE_DEVICES"
            )
    ids = tuple(range(num_gpus))
    keeps_base, sleeping = False, "sleeping during training"
    if shape is not None and hardware is not None and config.model.adapter is not None:
        keeps_base = base_fits(config, shape, hardware, num_gpus)
        base = f"base model ({served_base_bytes(config, shape) / 1e9:.3g} GB per GPU)"
        sleeping = (
            f"keeping its {base} and freeing its KV cache during training"
            if keeps_base
            else f"sleeping during training, its {base} in host memory"
        )
    return GpuSplit(
        num_processes=num_gpus,
        training_gpus=ids,
        server_gpus=_by_server(ids, size),
        shared=True,
        keeps_base=keeps_base,
        reason=f"{_gpus(ids)} {'trains and samples' if num_gpus == 1 else 'train and sample'} in turn"
        + (f" ({_count(num_gpus // size, rollout.server_name)}, {size} GPUs each)" if size > 1 else "")
        + f", {rollout.program} {sleeping}: {why}",
    )


def _may_share(rollout: ServersConfig, num_gpus: int) -> bool:
    number, rest = divmod(num_gpus, rollout.tensor_parallel)
    return rest == 0 and rollout.servers in ("auto", number) and not rollout.samples_ahead


def _fits_on_fewer(config: Config, shape: ModelShape | None, hardware: Hardware | None, num_gpus: int) -> bool:
    """Whether twice as many servers would fit, of half as many of the training GPUs each; False if unknown."""
    size = config.rollout.tensor_parallel // 2 if config.rollout.uses_servers else 0
    if shape is None or hardware is None or size == 0:
        return False
    rollout = config.rollout.model_copy(update={"tensor_parallel": size})
    fewer = config.model_copy(update={"rollout": rollout})
    return memory_shortfall(fewer, shape, hardware, num_gpus, shared=True) is None


def _num_sampling(config: Config, rollout: ServersConfig, num_gpus: int) -> int:
    """Number of rollout GPUs, if the configuration fixes it or the number of processes.

    Raises:
        UserError: there are too few GPUs, or the number does not divide into servers.
    """
    processes, wanted, per_server = config.hardware.processes, config.hardware.rollout_gpus, rollout.tensor_parallel
    left = num_gpus - (1 if processes == "auto" else processes)
    if wanted == "auto":
        num = left // per_server * per_server if rollout.servers == "auto" else rollout.servers * per_server
        if not per_server <= num <= left:
            servers = f"{rollout.servers} servers" if rollout.servers != "auto" else "one server"
            raise UserError(
                f"rollout.tensor_parallel: {per_server}: {servers} of {_count(per_server, 'GPU')} would need "
                f"{max(num, per_server)}, and hardware.processes: {processes} leaves {left} of {num_gpus}; use "
                + _suggestions(num_gpus, max(num, per_server), left, per_server)
            )
        return num
    assert isinstance(wanted, int)
    if wanted > left:
        if processes == "auto" or wanted >= num_gpus:
            rule = f"of {_count(num_gpus, 'GPU')} leaves none to train"
            ways = f"at most {left}, or shared" if left else "shared"
        else:
            rule = (
                f"and hardware.processes: {processes} need {wanted + processes} GPUs, and this machine has {num_gpus}"
            )
            ways = f"processes: {num_gpus - wanted} or auto" + (f", or rollout_gpus: {left}" if left else "")
        raise UserError(f"hardware.rollout_gpus: {wanted} {rule}; use {ways}")
    if wanted % per_server:
        near = [n for n in (wanted // per_server * per_server, math.ceil(wanted / per_server) * per_server) if n]
        raise UserError(
            f"hardware.rollout_gpus: {wanted} is not a multiple of rollout.tensor_parallel: {per_server}, the GPUs per "
            f"server; use {_join_or([n for n in near if n <= left] or [1])}"
            + ("" if any(n <= left for n in near) else " with tensor_parallel: 1")
        )
    if rollout.servers not in ("auto", wanted // per_server):
        raise UserError(
            f"rollout.servers: {rollout.servers} of {_count(per_server, 'GPU')} each (rollout.tensor_parallel) do not "
            f"match hardware.rollout_gpus: {wanted}; use servers: auto ({wanted // per_server})"
        )
    return wanted


def _suggestions(num_gpus: int, needed: int, left: int, per_server: int) -> str:
    ways = [f"hardware.processes: {num_gpus - needed}"] if needed < num_gpus else []
    if left >= per_server:
        ways.append(f"rollout.servers: {left // per_server}")
    elif left:
        ways.append(f"rollout.tensor_parallel: {left}")
    return _join_or(ways or ["fewer GPUs per server"])


def _by_server(gpus: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(gpus[i : i + size] for i in range(0, len(gpus), size))


def _separate_split(rollout: ServersConfig, num_gpus: int, num_training: int, num_sampling: int, why: str) -> GpuSplit:
    """Train on the first GPUs and sample on the next ones."""
    training = tuple(range(num_training))
    sampling = tuple(range(num_training, num_training + num_sampling))
    idle = tuple(range(num_training + num_sampling, num_gpus))
    size = rollout.tensor_parallel
    servers = _by_server(sampling, size)
    each = f", {size} GPUs each" if size > 1 else ""
    return GpuSplit(
        num_processes=num_training,
        training_gpus=training,
        server_gpus=servers,
        shared=False,
        reason=f"{_gpus(training)} {'trains' if num_training == 1 else 'train'}, {_gpus(sampling)} "
        f"{'samples' if num_sampling == 1 else 'sample'} ({_count(len(servers), rollout.server_name)}{each})"
        + (f", {_gpus(idle)} {'is' if len(idle) == 1 else 'are'} not used" if idle else "")
        + f": {why}",
    )


# Comparison of splits


def _fastest_split(
    config: Config, rollout: ServersConfig, num_gpus: int, shape: ModelShape | None, hardware: Hardware | None
) -> GpuSplit:
    """Fastest fitting split, or shared GPUs if that is faster or no split fits.

    Servers of several GPUs share them only if they would not fit on fewer each: how much faster they are depends on the
    links between the GPUs, which are not known.

    Raises:
        NoSplitFitsError: nothing fits.
        UserError: no number of servers is possible with these GPUs.
    """
    size = rollout.tensor_parallel
    numbers = range(size, num_gpus, size) if rollout.servers == "auto" else [rollout.servers * size]
    candidates = [n for n in numbers if n < num_gpus]
    may_share = _may_share(rollout, num_gpus) and not _fits_on_fewer(config, shape, hardware, num_gpus)
    if not candidates and may_share:
        return _shared(config, rollout, num_gpus, f"a server needs {num_gpus} GPUs", shape, hardware)
    if not candidates:
        servers = f"rollout.servers: {rollout.servers} with " if rollout.servers != "auto" else ""
        raise UserError(
            f"{servers}rollout.tensor_parallel: {size} on {_count(num_gpus, 'GPU')} leaves none to train; use at most "
            f"{_count(num_gpus - 1, 'GPU')} for the servers, such as tensor_parallel: 1 with servers: auto"
            + (", or hardware.rollout_gpus: shared" if _may_share(rollout, num_gpus) else "")
        )
    is_known = shape is not None and hardware is not None
    if shape is None or hardware is None:
        shape = preset_shape(_STAND_IN_SHAPE)
        hardware = Hardware(gpu_name=DEFAULT_GPU, gpu_memory_bytes=_STAND_IN_MEMORY, gpus_per_node=num_gpus, nodes=1)
    problems = {n: memory_shortfall(config, shape, hardware, num_gpus - n) for n in candidates}
    fitting = [n for n in candidates if problems[n] is None]
    may_share = may_share and memory_shortfall(config, shape, hardware, num_gpus, shared=True) is None
    if not fitting:
        problem = str(problems[candidates[0]])
        if may_share:
            return _shared(config, rollout, num_gpus, f"with separate GPUs, {problem}", shape, hardware)
        raise _nothing_fits(config, rollout, shape, hardware, num_gpus, problem)
    times = {n: plan_step(config, shape, hardware, num_training=num_gpus - n, num_sampling=n).times for n in fitting}
    best = min(fitting, key=lambda n: (times[n].step_s, n))
    if may_share and is_known:
        shared = plan_step(
            config,
            shape,
            hardware,
            num_training=num_gpus,
            num_sampling=num_gpus,
            shared=True,
            keeps_base=base_fits(config, shape, hardware, num_gpus),
        ).times
        if shared.step_s < times[best].step_s:
            separate_s = digits(times[best].step_s, 3)
            why = f"{shared.describe()} predicted; {num_gpus - best} + {best} would take {separate_s} s"
            return _shared(config, rollout, num_gpus, why, shape, hardware)
    why = f"{times[best].describe()} predicted"
    near = [
        f"{num_gpus - n} + {n} would take {digits(times[n].step_s, 3)} s"
        for n in (best - size, best + size)
        if n in times
    ]
    why += f"; {' and '.join(near)}" if near else ""
    if not is_known:
        why += " (for a 1B model on H100s, since model or GPU is unknown; memory was not checked)"
    return _separate_split(rollout, num_gpus, num_gpus - best, best, why)


def _nothing_fits(
    config: Config, rollout: ServersConfig, shape: ModelShape, hardware: Hardware, num_gpus: int, problem: str
) -> NoSplitFitsError:
    ways = _what_fits(config, rollout, shape, hardware, num_gpus)
    return NoSplitFitsError(
        f"hardware.rollout_gpus: auto: nothing fits {num_gpus} GPUs of {hardware.gpu_memory_bytes / 1e9:.3g} GB: "
        f"{problem}; use {_join_or([*ways, 'a number for rollout_gpus, which is not compared with the memory'])}"
    )


def _what_fits(
    config: Config, rollout: ServersConfig, shape: ModelShape, hardware: Hardware, num_gpus: int
) -> list[str]:
    """Changes that let servers and training fit, on the same GPUs or others, those that change no gradient first."""
    parallel = sorted({rollout.tensor_parallel, 1, 2, 4, 8})
    keeping_less = {} if config.model.gradient_checkpointing == "auto" else {"gradient_checkpointing": True}
    for changes in ({}, keeping_less, {"dtype": "bfloat16"}, {**keeping_less, "dtype": "bfloat16"}):
        model = config.model.model_copy(update=changes)
        words = [f"model.{key}: {str(value).lower()}" for key, value in changes.items()]
        for size in parallel:
            other = rollout.model_copy(update={"tensor_parallel": size})
            changed = config.model_copy(update={"model": model, "rollout": other})
            if shape.num_heads % size:
                continue
            fits = size < num_gpus and memory_shortfall(changed, shape, hardware, num_gpus - size) is None
            if not fits and _may_share(other, num_gpus):
                fits = memory_shortfall(changed, shape, hardware, num_gpus, shared=True) is None
            if fits:
                size_words = [] if size == rollout.tensor_parallel else [f"rollout.tensor_parallel: {size}"]
                return [" with ".join([*words, *size_words])]
    return ["more GPUs"]


# Text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def _gpus(ids: tuple[int, ...]) -> str:
    """Name consecutive GPUs."""
    return f"GPU {ids[0]}" if len(ids) == 1 else f"GPUs {ids[0]}-{ids[-1]}"


def _near_divisors(number: int, size: int) -> str:
    """Name the divisors of a number next to one that does not divide it."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return _join_or([max(n for n in divisors if n < size), *[n for n in divisors if n > size][:1]])


def _join_or(ways: Sequence[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, ways)))
