"""`cohort plan --like RUN`: how fast an earlier run was, relative to what the closed forms say of it."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from cohort.config import load_config
from cohort.errors import UserError
from cohort.plan.hardware import Hardware, Pace
from cohort.plan.layout import GpuLayout
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import read_shape

_TRAINING = ("forward_only", "pack", "train", "optim", "publish")


def read_pace(run: Path) -> Pace:
    """Compare the median step of a run, without its first, with the plan of its configuration.

    Args:
        run: folder of the run, with `config.yaml`, `plan.json` and `metrics.jsonl`.

    Raises:
        UserError: something that this needs is missing.
    """
    config = load_config(run / "config.yaml", ())
    steps = _steps(run)
    if len(steps) < 2:
        raise UserError(f"--like: {run}/metrics.jsonl has {len(steps)} steps; 2 are needed, as the first is slow")
    if config.rollout.samples_ahead:
        raise UserError(
            f"--like: {run} samples ahead (rollout.max_staleness), so its metrics do not say how long sampling takes; "
            f"use a run without"
        )
    try:
        kept = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        machine, placed = kept["hardware"], kept["layout"]
        hardware = Hardware(
            gpu_name=machine["gpu"],
            **{key: machine[key] for key in ("gpu_memory_bytes", "gpus_per_node", "nodes", "on_gpu")},
            pace=Pace(training=1.0, sampling=1.0, run=str(run), device=machine["gpu"], engine=config.rollout.engine),
        )
        servers = config.hardware.rollout_gpus
        layout = GpuLayout(
            num_training=placed["training_gpus"],
            num_sampling=placed["sampling_gpus"] or (servers if isinstance(servers, int) else 0),
            shared=placed["shared"],
            reason="as it ran",
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--like: {run}/plan.json, which says on what the run ran, cannot be read: {error}") from error
    planned = predict_run(config, read_shape(config.model.path), hardware, layout=layout).timing
    training, sampling = (
        statistics.median(sum(row.get(f"time/{phase}_s", 0.0) for phase in phases) for row in steps[1:])
        for phases in (_TRAINING, ("rollout",))
    )
    assert hardware.pace is not None
    return replace(
        hardware.pace,
        training=training / sum(planned[phase].value for phase in ("training_s", "publish_s") if phase in planned),
        sampling=sampling / planned["sampling_s"].value,
        reward_s=statistics.median(row.get("time/reward_s", 0.0) for row in steps[1:]),
    )


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


def _steps(run: Path) -> list[dict[str, Any]]:
    """Rows of training steps, in order."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--like: {run}/metrics.jsonl cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # a kill may have cut the last one
                raise UserError(f"--like: {run}/metrics.jsonl, line {number} is no JSON: {error}") from error
    steps = [row for row in rows if "step_time" in row]
    for column in ("time/rollout_s", "time/train_s"):
        if any(column not in row for row in steps):
            raise UserError(f"--like: {run}/metrics.jsonl has steps without {column!r}; use a run of this version")
    return steps
