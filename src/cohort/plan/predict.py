"""Predict layout, memory and time of a run from the configuration and the model's shape."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import Config, SamplingConfig
from cohort.plan.cost import PlannedValue, Source, plan_timing
from cohort.plan.defaults import with_checkpointing
from cohort.plan.hardware import Hardware
from cohort.plan.layout import GpuLayout, check_cpu_offload, check_processes, plan_layout
from cohort.plan.memory import (
    CERTAIN,
    CUDA_BYTES,
    NCCL_BYTES,
    SLEEPING_SERVER_BYTES,
    WORKSPACE_SERVER_BYTES,
    MemoryPlan,
    backward_bytes,
    checkpointed_activations,
    host_bytes,
    plan_memory,
)
from cohort.plan.rollout_engine import plan_engine
from cohort.plan.schedule import MicroBatchPlan, min_budget, plan_micro_batches, schedule_run
from cohort.plan.shape import ModelShape
from cohort.plan.step import PlannedStep, plan_step
from cohort.plan.timing import digits
from cohort.plan.workload import Checkpointing, Workload, critic_workload, process_workload

CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)  # from the fastest to the most saving
_EQUAL = 1.01  # times within 1 % count as equal
_TRL_LOGITS = 3  # copies of padded logits in float32: logits, their gradient, a temporary


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Layout, memory and time of a run."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    layout: GpuLayout
    micro_batches: MicroBatchPlan
    workload: Workload  # per training process
    memory: MemoryPlan
    num_prompts: int | None
    num_steps: int | None  # None if neither configuration nor data gives it
    timing: Mapping[str, PlannedValue]
    communication: str | None = None  # between training GPUs, in words; None: as usual, hidden by computation
    trl_bytes: int  # same completions: padded, full logits, unshared prompts
    wanted: Config | None = None  # from `predict_wanted`: the configuration before its engine was resolved
    engine_reason: str | None = None  # why `rollout.engine: auto` is not the preferred one
    checkpointing_s: float | None = None  # per step, of what `gradient_checkpointing: auto` chose; None: it is given

    @property
    def configured(self) -> Config:
        """The configuration as given, before `auto` was resolved."""
        config = self.wanted or self.config
        return config if self.checkpointing_s is None else with_checkpointing(config, "auto")

    @property
    def chosen_checkpointing(self) -> str | None:
        """What `model.gradient_checkpointing: auto` chose and why, in words; None if it is given."""
        kind, seconds = self.config.model.gradient_checkpointing, self.checkpointing_s
        if seconds is None:
            return None
        if kind is False:
            return "false, since training fits without checkpointing"
        if not self.fits:
            return "true, which needs the least memory"
        difference = f"{digits(abs(seconds), 2)} s {'more' if seconds > 0 else 'less'}"
        return f"{str(kind).lower()}, the fastest that fits: {difference} per step than without checkpointing"

    @property
    def headroom_bytes(self) -> int:
        """GPU memory left in the largest phase; negative if it does not fit."""
        return self.hardware.gpu_memory_bytes - self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every phase fits on some split of the GPUs."""
        return self.headroom_bytes >= 0 and self.layout.problem is None

    @property
    def num_idle(self) -> int:
        """GPUs that neither train nor sample."""
        return max(0, self.hardware.num_gpus - self.layout.num_used)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user."""
        notes = [] if self.layout.problem is None else [self.layout.problem]
        limit, longest = self.shape.max_positions, min_budget(self.config)
        if limit is not None and longest > limit:
            notes.append(
                f"rollout.max_prompt_tokens + {self.config.rollout.max_new_tokens_key} = {longest} exceeds the "
                f"model's {limit} positions; training will refuse prompts that long"
            )
        if self.config.rollout.has_turns:
            notes.append(_turns_note(self.config.rollout))
        if self.workload.adapter is not None and self.workload.adapter.warning is not None:
            notes.append(self.workload.adapter.warning)
        if self.workload.freezes:
            notes.append(
                "model.freeze: the plan counts frozen weights as trained; the run needs less, without their gradients "
                "and optimizer state"
            )
        if size := host_bytes(self.workload):
            kinds = {
                "weights": self.workload.optimizer_on_host,
                "the optimizer's state": self.workload.optimizer_on_host,
                "gradients": self.workload.parameters_on_host,
                "the reference": self.workload.reference_on_host,
                "activations": self.workload.offload,
            }
            listed = ", ".join(kind for kind, is_there in kinds.items() if is_there)
            notes.append(f"each training process keeps {size / 1e9:.1f} GB in host memory: {listed}")
        return tuple(notes)

    @property
    def memory_origins(self) -> dict[str, Source]:
        """Origin of each part of the memory table, and of the available memory (`there`)."""
        parts = dict.fromkeys(part for phase in self.memory.phases.values() for part in phase)
        there = Source("assumed", "as given, or typical of this GPU")
        if self.hardware.memory_is_measured:
            there = Source("measured", "this machine's, per process")
        return {**{part: _part_origin(part, self.workload, self.hardware) for part in parts}, "there": there}

    @property
    def completions_per_step(self) -> int:
        """Number of completions in a step, over all processes."""
        return self.config.train.prompts_per_step * self.config.rollout.num_generations

    @property
    def steps_per_epoch(self) -> float | None:
        """Number of steps to see every prompt once."""
        return None if self.num_prompts is None else self.num_prompts / self.config.train.prompts_per_step

    @property
    def num_updates(self) -> int | None:
        """Number of optimizer steps in the whole run."""
        return None if self.num_steps is None else self.num_steps * self.config.train.updates_per_rollout

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON-compatible values."""
        return {
            "model": {
                "name": self.shape.name,
                "parameters": self.shape.num_parameters,
                "active_parameters": self.shape.active_parameters,
            },
            "hardware": {
                "gpu": self.hardware.gpu_name,
                "gpu_memory_bytes": self.hardware.gpu_memory_bytes,
                "gpus_per_node": self.hardware.gpus_per_node,
                "nodes": self.hardware.nodes,
                "on_gpu": self.hardware.on_gpu,
            },
            "layout": {
                "training_gpus": self.layout.num_training,
                "sampling_gpus": self.layout.num_sampling,
                "idle_gpus": self.num_idle,
                "shared": self.layout.shared,
                "keeps_base": self.layout.keeps_base,
                "reason": self.layout.reason,
                "gradient_checkpointing": self.config.model.gradient_checkpointing,
                "checkpointing_s": self.checkpointing_s,
                "dp_replicate": self.workload.dp_replicate,
                "sync_each_micro_batch": not self.workload.keeps_whole_gradients,
                "communication": self.communication,
                "micro_batch_tokens": self.micro_batches.budget_tokens,
                "micro_batches_per_step": self.micro_batches.num_micro_batches,
                "completions_per_micro_batch": self.micro_batches.completions_per_micro_batch,
                "prompts_per_step": self.config.train.prompts_per_step,
                "completions_per_step": self.completions_per_step,
                "updates_per_step": self.config.train.updates_per_rollout,
                "completions_per_process_and_step": self.micro_batches.completions_per_rank,
                "prompts_per_process_and_step": self.micro_batches.prompts_per_rank,
                "num_prompts": self.num_prompts,
                "steps_per_epoch": self.steps_per_epoch,
                "num_steps": self.num_steps,
                "num_updates": self.num_updates,
            },
            "memory": {
                "origins": {part: source._asdict() for part, source in self.memory_origins.items()},
                "phases": {
                    phase: {"total": self.memory.total(phase), "parts": dict(parts)}
                    for phase, parts in self.memory.phases.items()
                },
                "peak_bytes": self.memory.peak_bytes,
                "peak_phase": self.memory.peak_phase,
                "headroom_bytes": self.headroom_bytes,
                "fits": self.fits,
                "trl_bytes": self.trl_bytes,
                "activations_by_checkpointing": {
                    str(kind).lower(): size for kind, size in checkpointed_activations(self.workload).items()
                },
            },
            "notes": list(self.notes),
            "timing": {name: {"value": n.value, "origin": n.origin, "how": n.how} for name, n in self.timing.items()},
        }


def predict_run(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    *,
    num_prompts: int | None = None,
    layout: GpuLayout | None = None,
) -> Plan:
    """Predict layout, memory and time of a run, with `model.gradient_checkpointing: auto` resolved.

    Args:
        config: configuration of the run.
        shape: shape of its model.
        hardware: hardware that it runs on.
        num_prompts: number of training prompts, if known.
        layout: GPU layout; planned by default.

    Raises:
        UserError: configuration and hardware contradict each other.
    """
    if config.model.gradient_checkpointing == "auto":
        return _predict_fastest(config, shape, hardware, num_prompts=num_prompts, layout=layout)
    layout = layout or plan_layout(config, shape, hardware)
    check_cpu_offload(config, on_gpu=hardware.on_gpu, processes=layout.num_training)
    check_processes(config, layout.num_training)
    step = plan_step(
        config,
        shape,
        hardware,
        num_training=layout.num_training,
        num_sampling=layout.num_sampling,
        shared=layout.shared,
        keeps_base=layout.keeps_base,
    )
    num_steps = config.train.steps
    if num_prompts is not None:
        num_steps = schedule_run(config, num_prompts=num_prompts).num_steps
    return Plan(
        config=config,
        shape=shape,
        hardware=hardware,
        layout=layout,
        micro_batches=step.micro_batches,
        workload=step.workload,
        memory=plan_memory(step.workload),
        num_prompts=num_prompts,
        num_steps=num_steps,
        timing=plan_timing(config, hardware, layout, step, num_steps=num_steps),
        communication=_describe_communication(step),
        trl_bytes=_trl_bytes(config, step.workload, step.micro_batches),
    )


def _describe_communication(step: PlannedStep) -> str | None:
    """Say how long GPUs communicate, and how; None if each step is reduced over all of them and that is hidden."""
    copies, keeps = step.workload.dp_replicate, step.workload.keeps_whole_gradients
    if not step.bound_by_communication and copies == 1 and not keeps:
        return None
    seconds = f"{digits(step.communication_s, 3)} s beside {digits(step.computing_s, 3)} s of computing"
    how = f"hardware.dp_replicate: {copies}, sync_each_micro_batch: {str(not keeps).lower()}"
    return f"{seconds} per step{', bound by communication' * step.bound_by_communication} ({how})"


def _predict_fastest(
    config: Config, shape: ModelShape, hardware: Hardware, *, num_prompts: int | None, layout: GpuLayout | None
) -> Plan:
    """Predict a run with the fastest checkpointing that fits or, if none does, with the most saving.

    On a CPU, whose times and memory are less certain, with none.
    """

    def predict(kind: Checkpointing, layout: GpuLayout | None = layout) -> Plan:
        config_ = with_checkpointing(config, kind)
        return predict_run(config_, shape, hardware, num_prompts=num_prompts, layout=layout)

    if not hardware.on_gpu:
        return predict(False)
    plans = [predict(kind) for kind in CHECKPOINTING]
    fitting = [plan for plan in plans if plan.fits and _has_room(plan)] or plans[-1:]
    if config.model.activation_offload:  # not every version of transformers can do both
        fitting = fitting[:1]
    fastest_s = min(map(_step_s, fitting))
    plan = next(plan for plan in fitting if _step_s(plan) <= fastest_s * _EQUAL)
    unsaved = plans[0]
    if unsaved.layout != plan.layout:
        unsaved = predict(False, plan.layout)
    return replace(plan, checkpointing_s=_step_s(plan) - _step_s(unsaved))


def _has_room(plan: Plan) -> bool:
    """Whether a token budget can be found, even if the run needs somewhat more than planned.

    A given budget is halved when memory runs out, but no budget is below the smallest.
    """
    if plan.config.train.micro_batch_tokens != "auto":
        return True
    micro_batches = plan_micro_batches(plan.config, plan.layout.num_training, min_budget(plan.config))
    layout = plan.layout
    workload = process_workload(
        plan.config, plan.shape, plan.hardware, micro_batches, shared=layout.shared, keeps_base=layout.keeps_base
    )
    return backward_bytes(workload) <= CERTAIN * plan.hardware.gpu_memory_bytes


def _step_s(plan: Plan) -> float:
    return plan.timing["step_s"].value


def predict_wanted(config: Config, shape: ModelShape, hardware: Hardware, *, num_prompts: int | None = None) -> Plan:
    """Predict a run like `predict_run`, with `rollout.engine: auto` resolved as a run on GPUs does."""
    settings, reason = plan_engine(config, shape, hardware) if hardware.on_gpu else (config, None)
    plan = predict_run(settings, shape, hardware, num_prompts=num_prompts)
    return replace(plan, wanted=config, engine_reason=reason)


def _part_origin(part: str, workload: Workload, hardware: Hardware) -> Source:
    """Origin of a part of the memory table."""
    if part == "rollout server's share":
        return Source("derived", "rollout.gpu_memory_utilization of the memory")
    if part == "activations":
        return Source("derived", "what layers keep for backward")
    if part != "framework":
        return Source("derived", "bytes of tensors, in closed form")
    if hardware.resident_bytes is not None:
        return Source("measured", "resident memory of this process before loading the model")
    assumed = [
        f"{bytes_ / 1e9:.1f} GB {what} (assumed)"
        for what, bytes_, is_there in (
            ("for CUDA", CUDA_BYTES, True),
            ("for NCCL", NCCL_BYTES, workload.on_gpu and workload.processes > 1),
            ("for a sleeping server", SLEEPING_SERVER_BYTES, workload.awake_server_bytes > 0),
            ("for NCCL in one of several GPUs", NCCL_BYTES, workload.server_spans_gpus),
            ("for the workspaces of one that keeps its base", WORKSPACE_SERVER_BYTES, workload.kept_base_bytes > 0),
        )
        if is_there
    ]
    return Source("assumed", ", ".join(assumed))


def _turns_note(rollout: SamplingConfig) -> str:
    """Say what the plan assumes of trajectories of several turns."""
    default = "" if rollout.max_trajectory_tokens else ", by default max_turns x max_completion_tokens"
    return (
        f"every trajectory is planned with {rollout.max_new_tokens} tokens after the prompt "
        f"({rollout.max_new_tokens_key}{default}) in {rollout.max_turns} turns (rollout.max_turns); the time that "
        f"tools and environments take is not predicted"
    )


def _trl_bytes(config: Config, workload: Workload, micro_batches: MicroBatchPlan) -> int:
    """Memory of the same completions as padded rows with a prompt each and full logits, equally sharded."""
    rollout = config.rollout
    tokens = micro_batches.completions_per_micro_batch * (rollout.max_prompt_tokens + rollout.max_new_tokens)
    padded = replace(workload, packed_tokens=tokens, shared_prefix_tokens=0, loss_tokens=0, gradients_in_forward=False)
    if workload.critic is not None:
        padded = replace(padded, critic=critic_workload(padded, workload.critic.shape))
    loss_tokens = micro_batches.completions_per_micro_batch * (rollout.max_new_tokens + 1)
    return backward_bytes(padded) + _TRL_LOGITS * 4 * loss_tokens * workload.shape.vocabulary
