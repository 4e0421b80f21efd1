"""What a run asks of its machine: time per phase, memory against the plan, publishing."""

import numpy as np

from cohort.view.files import mapping, number, text
from cohort.view.marks import marks, messages
from cohort.view.records import (
    FloatArray,
    Machine,
    MemoryPart,
    MemorySeries,
    MemorySummary,
    PlannedPhase,
    PublishTimes,
)
from cohort.view.run import ViewedRun
from cohort.view.series import downsample

_POINTS = 800
_WITHIN_OTHERS = ("communication", "move")  # parts of other phases
_MEASURED = {  # the metric memory/{}_peak_bytes that covers a phase of the plan
    "sampling": "rollout",
    "logprobs": "train",
    "backward": "train",
    "optimizer": "optim",
}


def machine(run: ViewedRun) -> Machine:
    """Return what a run asks of its machine, by step."""
    table = run.metrics
    rows = downsample(table.column("step_time"), _POINTS)
    phases = [name[len("time/") : -len("_s")] for name in table.names if name.startswith("time/")]
    phases = [phase for phase in phases if phase not in _WITHIN_OTHERS]
    steps = table.steps[rows]
    return Machine(
        phases=phases,
        x=steps,
        seconds={phase: table.column(f"time/{phase}_s")[rows] for phase in phases},
        totals={phase: float(np.nansum(table.column(f"time/{phase}_s"))) for phase in phases},
        num_steps=len(table.steps),
        step_time=table.column("step_time")[rows],
        memory=_memory_series(run),
        servers=[message for message in messages(run) if "server" in message.text],
        publish=PublishTimes(x=steps, seconds=table.column("time/publish_s")[rows]),
        hardware=dict(mapping(run.plan, "hardware")),
        layout=dict(mapping(run.plan, "layout")),
        marks=marks(run, "step"),
        problems=run.problems,
    )


def memory_summary(run: ViewedRun) -> MemorySummary:
    """Return the peak so far and what the plan predicts for it."""
    peaks = run.metrics.column("memory/peak_bytes")
    phases = {phase.phase: phase for phase in planned_phases(run)}
    peak = phases.get(text(run.plan, "memory", "peak_phase") or "")
    return MemorySummary(
        peak_bytes=float(np.nanmax(peaks)) if np.isfinite(peaks).any() else None,
        predicted_bytes=None if peak is None else float(peak.total),
        capacity_bytes=number(run.plan, "hardware", "gpu_memory_bytes"),
        parts=() if peak is None else peak.parts,
    )


def planned_phases(run: ViewedRun) -> list[PlannedPhase]:
    """Return the plan's memory by phase, as far as `memory/peak_bytes` measures it.

    On a GPU that is what PyTorch allocates, so that the framework's own memory is left out.
    """
    left_out = "framework" if run.plan is not None and mapping(run.plan, "hardware").get("on_gpu") else None
    found = []
    for name, phase in mapping(run.plan, "memory", "phases").items():
        sizes = {str(part): number(size) for part, size in mapping(phase, "parts").items() if part != left_out}
        parts = [MemoryPart(name=part, bytes=int(size)) for part, size in sizes.items() if size]
        parts.sort(key=lambda part: -part.bytes)
        total = sum(part.bytes for part in parts)
        found.append(PlannedPhase(phase=str(name), measured=_MEASURED.get(str(name)), parts=parts, total=total))
    return found


def _memory_series(run: ViewedRun) -> MemorySeries:
    table = run.metrics
    columns = {name: table.column(f"memory/{name}_peak_bytes") for name in ("rollout", "train", "optim")}
    rows = downsample(_largest(list(columns.values())), _POINTS)
    return MemorySeries(
        x=table.steps[rows],
        rollout=columns["rollout"][rows],
        train=columns["train"][rows],
        optim=columns["optim"][rows],
        plan=planned_phases(run),
        capacity_bytes=number(run.plan, "hardware", "gpu_memory_bytes"),
    )


def _largest(columns: list[FloatArray]) -> FloatArray:
    """[rows] largest of several columns; NaN where all are missing."""
    return np.fmax.reduce(columns)
