"""`cohort plan --like RUN` and `--against RUN`: an earlier run, relative to what the closed forms say of it."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.config import Config, load_config
from cohort.errors import UserError
from cohort.plan.hardware import Hardware, Pace
from cohort.plan.layout import GpuLayout
from cohort.plan.lengths import Lengths
from cohort.plan.memory import PHASES, Phase
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import read_shape

_MEMORY: Mapping[Phase, str] = {
    "sampling": "memory/rollout_peak_bytes",
    "backward": "memory/train_peak_bytes",
    "optimizer": "memory/optim_peak_bytes",
}
_OUTSIDE = ("framework", "rollout server's base", "rollout server's share")
_TRAINING = ("forward_only", "pack", "train", "optim", "publish")


def read_pace(run: Path) -> Pace:
    """Compare the median step of a run, without its first, with the plan of its configuration.

    Args:
        run: folder of the run, with `config.yaml`, `plan.json` and `metrics.jsonl`.

    Raises:
        UserError: something that this needs is missing.
    """
    plan, steps = _plan_of(run, option="--like")
    lengths = _lengths(plan.config, steps, run)
    if lengths is not None:
        plan = predict_run(plan.config, plan.shape, replace(plan.hardware, lengths=lengths), layout=plan.layout)
    config, planned = plan.config, plan.timing
    if config.rollout.samples_ahead:
        raise UserError(
            f"--like: {run} samples ahead (rollout.max_staleness), so its metrics do not say how long sampling takes; "
            f"use a run without"
        )
    training = sum(planned[phase].value for phase in ("training_s", "publish_s") if phase in planned)
    return Pace(
        training=_median(steps, *_TRAINING) / training,
        sampling=_median(steps, "rollout") / planned["sampling_s"].value,
        run=str(run),
        device=plan.hardware.gpu_name,
        engine=config.rollout.engine,
        reward_s=_median(steps, "reward"),
        lengths=lengths,
    )


def _lengths(config: Config, steps: Sequence[Mapping[str, Any]], run: Path) -> Lengths | None:
    """Mean and longest completion of a median step; None if the metrics do not say, or not what tools added."""
    mean, longest = (
        [row[f"completions/{kind}_length"] for row in steps if f"completions/{kind}_length" in row]
        for kind in ("mean", "max")
    )
    if config.rollout.has_turns or not mean or not longest:
        return None
    return Lengths(
        mean=max(1, round(statistics.median(mean))), longest=round(statistics.median(longest)), source=f"of {run}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was predicted of a part of a run, and what it was."""

    what: str
    unit: str
    predicted: float | None  # None: not predicted
    measured: float


def compare_run(run: Path) -> list[Comparison]:
    """Compare times and memory of a run with its plan; medians over its steps without the first.

    Raises:
        UserError: something that this needs is missing.
    """
    plan, steps = _plan_of(run, option="--against")
    times = {name: number.value for name, number in plan.timing.items()}
    rows: list[tuple[str, str, float | None, float]] = [
        (
            "sampling",
            "s",
            None if plan.config.rollout.samples_ahead else times["sampling_s"],
            _median(steps, "rollout"),
        ),
        ("rewards", "s", None, _median(steps, "reward")),
        ("training", "s", times["training_s"], _median(steps, "forward_only", "pack", "train", "optim")),
        ("publishing", "s", times.get("publish_s"), _median(steps, "publish")),
        ("step", "s", times["step_s"], statistics.median(row["step_time"] for row in steps)),
    ]
    for phase, column in _MEMORY.items():
        measured = [row[column] for row in steps if column in row]
        parts = plan.memory.phases[phase]
        # PyTorch's allocator, which measures on GPUs, knows nothing of these
        outside = sum(parts.get(part, 0) for part in _OUTSIDE) if plan.hardware.on_gpu else 0
        if measured:
            rows.append(
                (f"memory in {PHASES[phase]}", "GB", (sum(parts.values()) - outside) / 1e9, max(measured) / 1e9)
            )
    if (lengths := _lengths(plan.config, steps, run)) is not None:  # the times are predicted for the maximum
        rows.append(("mean completion, of the limit", "tokens", plan.config.rollout.max_new_tokens, lengths.mean))
    return [Comparison(what=what, unit=unit, predicted=p, measured=m) for what, unit, p, m in rows]


def _median(steps: list[dict[str, Any]], *phases: str) -> float:
    return statistics.median(sum(row.get(f"time/{phase}_s", 0.0) for phase in phases) for row in steps)


def _plan_of(run: Path, *, option: str) -> tuple[Plan, list[dict[str, Any]]]:
    """Plan a run on the hardware that it had, at the data sheet's pace, and read its steps without the first."""
    config = load_config(run / "config.yaml", ())
    steps = _steps(run, option=option)
    if len(steps) < 2:
        raise UserError(f"{option}: {run}/metrics.jsonl has {len(steps)} steps; 2 are needed, as the first is slow")
    try:
        kept = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        machine, placed = kept["hardware"], kept["layout"]
        framework = kept["memory"]["phases"]["optimizer"]["parts"].get("framework")
        hardware = Hardware(
            gpu_name=machine["gpu"],
            **{key: machine[key] for key in ("gpu_memory_bytes", "gpus_per_node", "nodes", "on_gpu")},
            pace=Pace(training=1.0, sampling=1.0, run=str(run), device=machine["gpu"], engine=config.rollout.engine),
            resident_bytes=None if machine["on_gpu"] else framework,
        )
        servers = config.hardware.rollout_gpus
        layout = GpuLayout(
            num_training=placed["training_gpus"],
            num_sampling=placed["sampling_gpus"] or (servers if isinstance(servers, int) else 0),
            shared=placed["shared"],
            reason="as it ran",
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{option}: {run}/plan.json, which says on what the run ran, cannot be read: {error}"
        ) from error
    return predict_run(config, read_shape(config.model.path), hardware, layout=layout), steps[1:]


def pace_notes(plan: Plan) -> list[str]:
    """Say what of the earlier run differs from the plan, and what the plan leaves out."""
    pace, notes = plan.hardware.pace, []
    if pace is None:
        return []
    for what, there, here in (
        ("device", pace.device, plan.hardware.gpu_name),
        ("engine", pace.engine, plan.config.rollout.engine),
    ):
        if there != here:
            notes.append(f"--like: {pace.run} had another {what} than is planned: {there}, not {here}")
    if pace.reward_s > 0:
        notes.append(f"--like: rewards took {pace.reward_s:.3g} s of a step of {pace.run}; the plan leaves them out")
    return notes


def _steps(run: Path, *, option: str) -> list[dict[str, Any]]:
    """Rows of training steps, in order."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{option}: {run}/metrics.jsonl cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # a kill may have cut the last one
                raise UserError(f"{option}: {run}/metrics.jsonl, line {number} is no JSON: {error}") from error
    steps = [row for row in rows if "step_time" in row]
    for column in ("time/rollout_s", "time/train_s"):
        if any(column not in row for row in steps):
            raise UserError(f"{option}: {run}/metrics.jsonl has steps without {column!r}; use a run of this version")
    return steps
