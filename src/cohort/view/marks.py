"""What happened to a run: restarts, warnings, checkpoints, evaluations and faults, as marks on its curves."""

import re
from typing import Literal

import numpy as np

from cohort.run_files import checkpoints
from cohort.view.records import Event, Mark, MarkKind, MessageLevel, RunMessage
from cohort.view.run import ViewedRun
from cohort.view.wall_time import WallTime

Axis = Literal["step", "time"]

_WARNING = "warning: "
_SIGNAL = re.compile("SIG[A-Z]+")
_FAULT = re.compile(
    r"\b(restarting|retrying in|continuing without|failed|crashed|died|exited|lost|damaged|out of memory|stopped by)\b",
    re.IGNORECASE,
)


def messages(run: ViewedRun) -> list[RunMessage]:
    """Return what the run told its user, in order: faults, warnings and notes."""
    return [_message(event) for event in run.events if event.event == "warning"]


def marks(run: ViewedRun, x: Axis, *, most: int | None = None) -> list[Mark]:
    """Return what happened to a run, in the order of the axis. Notes are left out.

    Args:
        run: the run.
        x: steps, or seconds since the run's start.
        most: leave out checkpoints, or evaluations, if there are more than this.
    """
    times = WallTime(run)
    found: list[tuple[float | None, MarkKind, str]] = []
    has_started = False
    step: int | None = None
    for event in run.events:
        mark = _mark(event, has_started=has_started)
        has_started |= event.event == "start"
        step = event.step if event.step is not None else step
        if mark is not None:
            found.append((step if x == "step" else times.at(event.timestamp, step), *mark))
    if not run.events:  # of a version that wrote none: what its folder and metrics tell
        found += [(times.axis(step, x), "checkpoint", f"Checkpoint after step {step}") for step in _saved_steps(run)]
        found += [(times.axis(int(step), x), "evaluation", "Evaluation") for step in run.metrics.eval.steps]
    found += [(times.axis(step, x), "fault", text) for step, text in _out_of_memory(run)]
    for kind in ("checkpoint", "evaluation"):
        if most is not None and sum(k == kind for _, k, _ in found) > most:
            found = [mark for mark in found if mark[1] != kind]
    ordered = sorted((float(at), kind, text) for at, kind, text in found if at is not None)
    if x == "step":  # after a restart, steps since the checkpoint are done, saved and evaluated again
        again = ("checkpoint", "evaluation")
        ordered = [
            mark for i, mark in enumerate(ordered) if mark[1] not in again or mark not in ordered[max(0, i - 1) : i]
        ]
    return [Mark(x=at, kind=kind, text=text) for at, kind, text in ordered]


def _mark(event: Event, *, has_started: bool) -> tuple[MarkKind, str] | None:
    """Return the kind and text of an event's mark; None for an event that gets none."""
    if event.event == "warning":
        message = _message(event)
        if message.level == "note" or "out of memory" in message.text:  # metrics tell the steps of the latter
            return None
        if message.text.startswith("stopped by "):  # the event "stop" says it too
            return None
        return ("fault" if message.level == "fault" else "warning"), message.text
    if event.event == "start" and has_started:
        return "restart", f"Restarted after step {event.values.get('steps_done', event.step)}"
    if event.event == "stop":
        reason = str(event.values.get("reason") or "no reason given")
        return ("warning" if _SIGNAL.fullmatch(reason) else "fault"), f"Stopped: {reason}"
    if event.event == "checkpoint":
        return "checkpoint", f"Checkpoint after step {event.step}"
    return ("evaluation", "Evaluation") if event.event == "evaluation" else None


def _message(event: Event) -> RunMessage:
    text = str(event.values.get("text", ""))
    level: MessageLevel = "warning" if text.startswith(_WARNING) else "fault" if _FAULT.search(text) else "note"
    return RunMessage(timestamp=event.timestamp, step=event.step, level=level, text=text.removeprefix(_WARNING))


def _saved_steps(run: ViewedRun) -> list[int]:
    try:
        return [int(path.name.removeprefix("step-")) for path in checkpoints(run.path / "checkpoints")]
    except OSError:
        return []


def _out_of_memory(run: ViewedRun) -> list[tuple[int, str]]:
    table = run.metrics
    counts = table.column("out_of_memory")
    rows = np.flatnonzero(counts > 0)
    return [(int(table.steps[row]), f"Out of memory in {counts[row]:.0f} micro-batches") for row in rows]
