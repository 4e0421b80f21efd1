"""The plan of a run: layout, memory and time together, from the configuration and a model's shape alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import Config
from cohort.plan.geometry import plan_run
from cohort.plan.hardware import Hardware
from cohort.plan.layout import Layout, check_host_memory, check_processes, plan_layout
from cohort.plan.memory import (
    ASLEEP_BYTES,
    CUDA_BYTES,
    NCCL_BYTES,
    MemoryPlan,
    checkpointed_activations,
    host_bytes,
    plan_memory,
)
from cohort.plan.rows import Rows, group_share_tokens, plan_rows, smallest_budget
from cohort.plan.shape import ModelShape
from cohort.plan.timetable import Number, plan_timing
from cohort.plan.work import Work, critic_work, work_of

_TRL_LOGITS = 3  # copies of padded logits in float32: logits, their gradient, a temporary


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do, need and take."""

    shape: ModelShape
    hardware: Hardware
    layout: Layout
    rows: Rows
    prompts_per_step: int  # of all processes together
    num_generations: int
    updates_per_step: int
    longest_tokens: int  # of a prompt with its completion
    work: Work  # of one training process
    memory: MemoryPlan
    num_prompts: int | None
    num_steps: int | None  # None where neither the configuration nor the data says
    timing: Mapping[str, Number]
    trl_bytes: int  # of the same completions at a time, with padding, whole logits and no shared prompts

    @property
    def headroom_bytes(self) -> int:
        """Of the GPU's memory, what is left in the largest phase; negative where it does not fit."""
        return self.hardware.gpu_memory_bytes - self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every phase fits, on some split of the GPUs."""
        return self.headroom_bytes >= 0 and self.layout.problem is None

    @property
    def num_idle(self) -> int:
        """GPUs that neither train nor sample."""
        return max(0, self.hardware.num_gpus - self.layout.num_used)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said besides."""
        notes = [] if self.layout.problem is None else [self.layout.problem]
        limit = self.shape.max_positions
        if limit is not None and self.longest_tokens > limit:
            notes.append(
                f"rollout.max_prompt_tokens and rollout.max_completion_tokens make {self.longest_tokens} tokens, and "
                f"the model knows {limit} positions: training refuses that if a prompt is that long"
            )
        if self.work.adapter is not None and self.work.adapter.note is not None:
            notes.append(self.work.adapter.note)
        if self.work.freezes:
            notes.append(
                "model.freeze: frozen weights are counted as if they were trained, so a run takes less: nothing for "
                "their gradients and the optimizer's state of them"
            )
        if waiting := host_bytes(self.work):
            state = self.work.masters_on_host or self.work.parameters_on_host
            kinds = ["weights", "the optimizer's state"] * state
            kinds += ["gradients"] * self.work.parameters_on_host + ["the reference"] * self.work.reference_visits
            kinds += ["activations"] * self.work.offload
            notes.append(
                f"{waiting / 1e9:.1f} GB of host memory for each training process hold what does not lie on its GPU: "
                f"{', '.join(kinds)}"
            )
        return tuple(notes)

    @property
    def memory_origins(self) -> dict[str, Number]:
        """Where the parts of the memory's table come from, and the memory that is there; each with its most bytes."""
        parts: dict[str, int] = {}
        for phase in self.memory.phases.values():
            for part, size in phase.items():
                parts[part] = max(size, parts.get(part, 0))
        return {
            **{part: origin_of(part, size, self.work, self.hardware) for part, size in parts.items()},
            "there": _memory_there(self.hardware),
        }

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps in which every prompt is seen once."""
        return None if self.num_prompts is None else self.num_prompts / self.prompts_per_step

    @property
    def num_updates(self) -> int | None:
        """Of the optimizer, in the whole run."""
        return None if self.num_steps is None else self.num_steps * self.updates_per_step

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
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
            },
            "layout": {
                "training_gpus": self.layout.num_training,
                "sampling_gpus": self.layout.num_sampling,
                "idle_gpus": self.num_idle,
                "shared": self.layout.shared,
                "reason": self.layout.reason,
                "micro_batch_tokens": self.rows.budget_tokens,
                "micro_batches_per_step": self.rows.num_micro_batches,
                "completions_per_micro_batch": self.rows.row_completions,
                "prompts_per_step": self.prompts_per_step,
                "completions_per_step": self.prompts_per_step * self.num_generations,
                "updates_per_step": self.updates_per_step,
                "completions_per_process_and_step": self.rows.completions,
                "prompts_per_process_and_step": self.rows.prompts,
                "num_prompts": self.num_prompts,
                "steps_per_epoch": self.steps_per_epoch,
                "num_steps": self.num_steps,
                "num_updates": self.num_updates,
            },
            "memory": {
                "origins": {part: {"origin": n.origin, "how": n.how} for part, n in self.memory_origins.items()},
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
                    str(kind).lower(): size for kind, size in checkpointed_activations(self.work).items()
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
    layout: Layout | None = None,
) -> Plan:
    """Work out layout, memory and time.

    Args:
        config: of the run.
        shape: of its model.
        hardware: that it gets.
        num_prompts: of the training data, where that could be counted.
        layout: where it is settled; otherwise it is worked out too.

    Raises:
        UserError: configuration and machines contradict each other.
    """
    layout = layout or plan_layout(config, shape, hardware)
    check_host_memory(config, on_gpu=hardware.on_gpu, processes=layout.num_training)
    check_processes(config, layout.num_training)
    wanted, share = config.train.micro_batch_tokens, group_share_tokens(config, layout.num_training)
    if wanted == "auto":
        wanted = _largest_budget(config, shape, hardware, layout, share)
    rows = plan_rows(config, layout.num_training, wanted)
    work = _work(config, shape, hardware, layout, rows)
    num_steps = config.train.steps
    if num_prompts is not None:
        num_steps = plan_run(config, num_prompts=num_prompts).num_steps
    return Plan(
        shape=shape,
        hardware=hardware,
        layout=layout,
        rows=rows,
        prompts_per_step=config.train.prompts_per_step,
        num_generations=config.rollout.num_generations,
        updates_per_step=config.train.updates_per_rollout,
        longest_tokens=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        work=work,
        memory=plan_memory(work),
        num_prompts=num_prompts,
        num_steps=num_steps,
        timing=plan_timing(config, hardware, layout, rows, work, num_steps=num_steps),
        trl_bytes=_trl_bytes(config, work, rows),
    )


def _largest_budget(config: Config, shape: ModelShape, hardware: Hardware, layout: Layout, most: int) -> int:
    """The largest budget that fits, as the run itself finds it; the smallest one where none does."""

    def fits(tokens: int) -> bool:
        rows = plan_rows(config, layout.num_training, tokens)
        needed = plan_memory(_work(config, shape, hardware, layout, rows)).total("backward")
        return needed <= hardware.gpu_memory_bytes

    low = smallest_budget(config)
    if not fits(low) or most <= low:
        return low
    if fits(most):
        return most
    high = most
    while high - low > 16:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _work(config: Config, shape: ModelShape, hardware: Hardware, layout: Layout, rows: Rows) -> Work:
    return work_of(config, shape, hardware, rows, num_training=layout.num_training, shared=layout.shared)


def origin_of(part: str, size: int, work: Work, hardware: Hardware) -> Number:
    """Where a part of the memory's table comes from."""
    if part == "vLLM's share":
        return Number(value=size, origin="derived", how="rollout.gpu_memory_utilization of the memory")
    if part != "framework":
        how = "bytes of tensors, in closed form" if part != "activations" else "what layers keep for backward"
        return Number(value=size, origin="derived", how=how)
    if hardware.resident_bytes is not None:
        return Number(value=size, origin="measured", how="resident in this process before it had a model")
    assumed = [
        f"{bytes_ / 1e9:.1f} GB {what} (assumed)"
        for what, bytes_, is_there in (
            ("for CUDA", CUDA_BYTES, hardware.measured is None),
            ("for NCCL", NCCL_BYTES, work.on_gpu and work.processes > 1),
            ("of a vLLM that sleeps", ASLEEP_BYTES, work.vllm_bytes > 0),
        )
        if is_there
    ]
    if hardware.measured is None:
        return Number(value=size, origin="assumed", how=", ".join(assumed))
    bytes_, told = hardware.measured.framework_bytes, hardware.measured.told()
    own = f"{bytes_ / 1e9:.1f} GB of a process without tensors (measured {told})"
    return Number(value=size, origin="assumed" if assumed else "measured", how=", ".join([own, *assumed]))


def _memory_there(hardware: Hardware) -> Number:
    size = hardware.gpu_memory_bytes
    if hardware.memory_is_measured and not hardware.on_gpu:
        return Number(value=size, origin="measured", how="of this machine, for each process")
    if hardware.memory_is_measured and hardware.measured is not None:
        return Number(value=size, origin="measured", how=hardware.measured.told())
    return Number(value=size, origin="assumed", how="what was said, or what such a GPU has for a process")


def _trl_bytes(config: Config, work: Work, rows: Rows) -> int:
    """Padded rows of as many completions with a prompt each, and their whole logits, in the same sharding."""
    rollout = config.rollout
    tokens = rows.row_completions * (rollout.max_prompt_tokens + rollout.max_completion_tokens)
    padded = replace(work, row_tokens=tokens, kept_prompt_tokens=0, scored_tokens=0, gradients_in_forward=False)
    if work.critic is not None:
        padded = replace(padded, critic=critic_work(padded, work.critic.shape))
    scored = rows.row_completions * (rollout.max_completion_tokens + 1)
    return plan_memory(padded).total("backward") + _TRL_LOGITS * 4 * scored * work.shape.vocabulary
