"""Where a run computes what: GPUs that train and that sample, and how a step's completions become micro-batches.

All sequences are taken to have the longest length. P prompt tokens, C completion tokens, G generations.
"""

import math
from dataclasses import dataclass

from cohort.config import Config, VllmRolloutConfig
from cohort.config.quantization import ONE_PROCESS
from cohort.errors import UserError
from cohort.plan.adapter import adapter_shape
from cohort.plan.critic import critic_shape
from cohort.plan.estimate import Sizes, predict, why_it_does_not_fit
from cohort.plan.hardware import Hardware
from cohort.plan.shape import ModelShape
from cohort.plan.split import DoesNotFitError, split_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Processes and GPUs of a run."""

    num_training: int  # GPUs that train, one process each
    num_sampling: int  # GPUs that sample; with `shared` the same ones; 0: somebody else's
    shared: bool
    reason: str
    problem: str | None = None  # why no split of these GPUs fits; the numbers are then those of shared ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one process computes in a step."""

    budget_tokens: int  # `train.micro_batch_tokens`, where that is auto what was found
    completions: float  # of the step on one process, in the mean
    prompts: float
    row_tokens: int  # of the largest micro-batch
    row_completions: int
    scored_tokens: int
    kept_prompt_tokens: int  # of a group that is computed in parts; 0 where whole groups fit
    num_micro_batches: int


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
    if not isinstance(rollout, VllmRolloutConfig):
        number = hardware.gpus_per_node if processes == "auto" else processes
        # a run on several nodes has as many processes on each
        number = min(number * hardware.nodes, hardware.num_gpus)
        return Layout(num_training=number, num_sampling=number, shared=True, reason="training processes sample")
    if rollout.urls:
        number = hardware.num_gpus if processes == "auto" else processes
        return Layout(num_training=number, num_sampling=0, shared=False, reason="servers of rollout.urls sample")
    if hardware.nodes > 1:
        return _whole_nodes(config, shape, hardware)
    num_gpus = hardware.gpus_per_node
    try:
        split = split_gpus(config, num_gpus=num_gpus, sizes=sizes_of(config, shape, hardware))
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
    per_node, sizes, rollout = hardware.gpus_per_node, sizes_of(config, shape, hardware), config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    tensor_parallel = rollout.tensor_parallel
    if tensor_parallel > per_node:
        raise UserError(f"rollout.tensor_parallel: {tensor_parallel} is more than the {per_node} GPUs of a node")
    numbers = range(1, hardware.nodes)
    fitting = [n for n in numbers if not why_it_does_not_fit(config, rollout, sizes, (hardware.nodes - n) * per_node)]
    times = {
        number: predict(
            config,
            sizes,
            num_training=(hardware.nodes - number) * per_node,
            num_sampling=number * (per_node // tensor_parallel) * tensor_parallel,
        ).step_s
        for number in fitting or numbers
    }
    number = min(times, key=lambda n: times[n])
    return Layout(
        num_training=(hardware.nodes - number) * per_node,
        num_sampling=number * (per_node // tensor_parallel) * tensor_parallel,
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


def sizes_of(config: Config, shape: ModelShape, hardware: Hardware) -> Sizes:
    """What a split has to fit."""
    adapter, critic = config.model.adapter, critic_shape(config, shape)
    return Sizes(
        gpu_name=hardware.gpu_name,
        gpu_memory_bytes=hardware.gpu_memory_bytes,
        num_parameters=shape.num_parameters,
        active_parameters=shape.active_parameters,
        on_gpu=hardware.on_gpu,
        measured=hardware.measured,
        adapter_parameters=adapter_shape(adapter, shape).num_parameters(shape.layers) if adapter else 0,
        critic=(critic.num_parameters, critic.active_parameters) if critic else None,
    )


def plan_rows(config: Config, num_training: int, budget_tokens: int) -> Rows:
    """Micro-batches of one process under a budget, when all sequences have the longest length."""
    rollout, prompts = config.rollout, config.train.prompts_per_step
    (before, after), group = _tokens(config), rollout.num_generations
    group_tokens = before + group * after
    share = prompts / num_training
    if group_tokens <= budget_tokens or group == 1:
        groups = max(1, min(budget_tokens // group_tokens, math.ceil(share)))
        row, completions, kept = groups * group_tokens, groups * group, 0
        number = math.ceil(math.ceil(share) / groups)
    else:
        completions = min(group, max(1, (budget_tokens - before) // after))
        row = completions * after
        kept = before
        number = math.ceil(share) * math.ceil(group / completions)
    return Rows(
        budget_tokens=budget_tokens,
        completions=share * group,
        prompts=share,
        row_tokens=row,
        row_completions=completions,
        scored_tokens=completions * rollout.max_completion_tokens,
        kept_prompt_tokens=kept,
        num_micro_batches=number,
    )


def group_share_tokens(config: Config, num_training: int) -> int:
    """Tokens of a whole step's share of one process: no budget needs to be larger."""
    before, after = _tokens(config)
    group = before + config.rollout.num_generations * after
    return math.ceil(config.train.prompts_per_step / num_training) * group


def _tokens(config: Config) -> tuple[int, int]:
    """Of a group's prompt, computed once, and of each completion. With dropout every completion has its own prompt."""
    rollout = config.rollout
    if config.model.adapter is not None and config.model.adapter.dropout:
        return 0, rollout.max_prompt_tokens + rollout.max_completion_tokens
    return rollout.max_prompt_tokens, max(1, rollout.max_completion_tokens - 1)  # the last token is not an input
