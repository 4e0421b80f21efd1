"""Curves: metrics of runs over steps or wall time, with few points, as CSV, and with marks for what happened."""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from cohort.health.metrics_table import MetricsTable
from cohort.metrics.catalogue import describe
from cohort.records import FloatArray, IntArray
from cohort_view.run import Event, ViewedRun


class WallTime:
    """Seconds since the start of a run.

    Attributes:
        table: the run's metrics at this moment.
        start: Unix seconds; None if the run has neither events nor metrics.
        train: [rows of the metrics] seconds.
        eval: [rows of the evaluations] seconds.
    """

    def __init__(self, run: ViewedRun):
        self.table = table = run.metrics
        times, eval_times = table.timestamps, table.eval.timestamps
        starts = [event.timestamp for event in run.events if event.event == "start" and math.isfinite(event.timestamp)]
        # without the event: when step 1 began
        known = [times[:1] - np.nan_to_num(table.column("step_time")[:1]), eval_times[:1]]
        self.start = min([*starts[:1], *(float(t[0]) for t in known if np.isfinite(t).all() and len(t))], default=None)
        # never backward, as when the machine's clock was set
        self.train, self.eval = (np.fmax.accumulate(t - (self.start or 0.0)) for t in (times, eval_times))

    def at(self, timestamp: float | None, step: int | None) -> float | None:
        """Return the place of an event on the axis; None if it is unknown."""
        if self.start is not None and timestamp is not None and math.isfinite(timestamp):
            return timestamp - self.start
        if step is None:
            return None
        row = int(np.searchsorted(self.table.steps, step, side="right"))
        return float(self.train[row - 1]) if row else 0.0


Axis = Literal["step", "time"]

_WARNING = "warning: "
SIGNAL = re.compile("SIG[A-Z]+")
_FAULT = re.compile(
    r"\b(restarting|retrying in|continuing without|failed|crashed|died|exited|lost|damaged|out of memory|stopped by)\b",
    re.IGNORECASE,
)


def messages(run: ViewedRun) -> list[dict[str, Any]]:
    """Return what the run told its user, in order; the level is "fault", "warning" or "note"."""
    return [_message(event) for event in run.events if event.event == "warning"]


def marks(run: ViewedRun, x: Axis, *, most: int | None = None) -> list[dict[str, Any]]:
    """Return what happened to a run, in the order of the axis. Notes are left out.

    Args:
        run: the run.
        x: steps, or seconds since the run's start.
        most: leave out checkpoints, or evaluations, if there are more than this.
    """
    times = WallTime(run)
    found: list[tuple[float | None, str, str]] = []
    has_started = False
    step: int | None = None
    for event in run.events:
        mark = _mark(event, has_started=has_started)
        has_started |= event.event == "start"
        step = event.step if event.step is not None else step
        if mark is not None:
            found.append((step if x == "step" else times.at(event.timestamp, step), *mark))
    for step, text in _out_of_memory(run):
        found.append((step if x == "step" else times.at(None, step), "fault", text))
    for kind in ("checkpoint", "evaluation"):
        if most is not None and sum(k == kind for _, k, _ in found) > most:
            found = [mark for mark in found if mark[1] != kind]
    ordered = sorted((float(at), kind, text) for at, kind, text in found if at is not None)
    if x == "step":  # after a restart, steps since the checkpoint are done, saved and evaluated again
        again = ("checkpoint", "evaluation")
        ordered = [
            mark for i, mark in enumerate(ordered) if mark[1] not in again or mark not in ordered[max(0, i - 1) : i]
        ]
    return [{"x": at, "kind": kind, "text": text} for at, kind, text in ordered]


def _mark(event: Event, *, has_started: bool) -> tuple[str, str] | None:
    """Return the kind and text of an event's mark; None for an event that gets none."""
    if event.event == "warning":
        message = _message(event)
        if message["level"] == "note" or "out of memory" in message["text"]:  # metrics tell the steps of the latter
            return None
        if message["text"].startswith("stopped by "):  # the event "stop" says it too
            return None
        return message["level"], message["text"]
    if event.event == "start" and has_started:
        return "restart", f"Restarted after step {event.values.get('steps_done', event.step)}"
    if event.event == "stop":
        reason = str(event.values.get("reason") or "no reason given")
        return ("warning" if SIGNAL.fullmatch(reason) else "fault"), f"Stopped: {reason}"
    if event.event == "checkpoint":
        return "checkpoint", f"Checkpoint after step {event.step}"
    return ("evaluation", "Evaluation") if event.event == "evaluation" else None


def _message(event: Event) -> dict[str, Any]:
    text = str(event.values.get("text", ""))
    level = "warning" if text.startswith(_WARNING) else "fault" if _FAULT.search(text) else "note"
    text = text.removeprefix(_WARNING).removeprefix(f"step {event.step}: ")
    return {"timestamp": event.timestamp, "step": event.step, "level": level, "text": text}


def _out_of_memory(run: ViewedRun) -> list[tuple[int, str]]:
    table = run.metrics
    counts = table.column("out_of_memory")
    rows = np.flatnonzero(counts > 0)
    return [(int(table.steps[row]), f"Out of memory in {counts[row]:.0f} micro-batches") for row in rows]


_SOURCE = re.compile("(eval/)?sources/")  # of which a step need not have any prompt
_MOST_REGULAR_MARKS = 200  # so many checkpoints or evaluations say nothing on a chart


def curves(
    runs: Sequence[ViewedRun],
    names: Sequence[str],
    x: Axis = "step",
    start: float | None = None,
    stop: float | None = None,
    points: int = 800,
) -> dict[str, Any]:
    """Return metrics of runs, downsampled.

    Args:
        runs: the runs, each refreshed.
        names: metrics; a run that does not have one has an empty curve.
        x: steps, or seconds since the run's start.
        start: first x; None: the first there is.
        stop: last x.
        points: maximum points of a curve, at least 4.
    """
    found = []
    for run in runs:
        times = WallTime(run)
        table = times.table  # not the run's, which another thread may have replaced since
        for name in names:
            rows = _table_with(table, name)
            at = np.asarray(rows.steps, np.float64) if x == "step" else times.train if rows is table else times.eval
            found.append(_curve(run.id, name, at, rows.column(name), start, stop, points))
    return {"curves": found, "marks": {run.id: marks(run, x, most=_MOST_REGULAR_MARKS) for run in runs}}


def curves_csv(runs: Sequence[ViewedRun], names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a CSV file with all points: run, step, timestamp and one column per metric."""
    yield _csv_line(["run", "step", "timestamp", *names])
    for run in runs:
        table = run.metrics
        for rows in (table, table.eval):
            columns = [rows.timestamps, *(rows.column(name) for name in names if _table_with(table, name) is rows)]
            known = [name for name in names if _table_with(table, name) is rows]
            for row in np.flatnonzero(np.isfinite(columns[1:]).any(axis=0)) if known else ():
                cells = dict(zip(["", *known], (_cell(float(column[row])) for column in columns), strict=True))
                yield _csv_line([run.id, str(rows.steps[row]), cells[""], *(cells.get(name, "") for name in names)])


def _cell(value: float) -> str:
    return repr(value) if np.isfinite(value) else ""


def metrics_list(run: ViewedRun) -> dict[str, Any]:
    """Return the metrics that a run has, in the order of its file."""
    found = []
    for table in (run.metrics, run.metrics.eval):
        for name in table.names:
            metric = describe(name)
            found.append(
                {
                    "name": name,
                    "group": metric.group,
                    "unit": metric.unit,
                    "description": metric.description,
                    "last": table.last(name),
                    "num_points": int(np.isfinite(table.column(name)).sum()),
                }
            )
    return {"metrics": found}


def downsample(values: FloatArray, points: int) -> IntArray:
    """Choose at most `points` of a curve's points: the first, last, lowest and highest of each bucket.

    Args:
        values: [n]; NaN: missing. A bucket without any value keeps one missing point, so that the gap shows.
        points: at least 4.

    Returns:
        Their indices, increasing. Both extremes of all values are among them.
    """
    if len(values) <= max(points, 4):
        return np.arange(len(values))
    buckets = _buckets(values, points)
    num_buckets, width = buckets.shape
    is_there = np.isfinite(buckets)
    chosen = [
        np.where(is_there, buckets, np.inf).argmin(axis=1),
        np.where(is_there, buckets, -np.inf).argmax(axis=1),
        is_there.argmax(axis=1),
        width - 1 - is_there[:, ::-1].argmax(axis=1),
    ]
    chosen[3] = np.where(is_there.any(axis=1), chosen[3], 0)
    return np.unique(np.stack(chosen) + np.arange(num_buckets) * width)


def bucket_means(values: FloatArray, points: int) -> FloatArray:
    """Return the mean of the bucket of each value, as `downsample` divides them. [n]"""
    buckets = _buckets(values, points)
    is_there = np.isfinite(buckets)
    num_there = is_there.sum(axis=1)
    sums = np.where(is_there, buckets, 0.0).sum(axis=1)
    means = np.divide(sums, num_there, out=np.full(len(buckets), np.nan), where=num_there > 0)
    return np.repeat(means, buckets.shape[1])[: len(values)]


def _buckets(values: FloatArray, points: int) -> FloatArray:
    """Divide values into at most `points // 4` buckets, the last filled up with NaN. [buckets, size]"""
    num_buckets = max(1, points // 4)
    width = -(-len(values) // num_buckets)
    num_buckets = -(-len(values) // width)
    padded = np.full(num_buckets * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(num_buckets, width)


def _table_with(table: MetricsTable, name: str) -> MetricsTable:
    """Return the metrics that have `name`: of training or of evaluations."""
    return table.eval if name not in table.names and name in table.eval.names else table


def _curve(
    run: str, name: str, x: FloatArray, y: FloatArray, start: float | None, stop: float | None, points: int
) -> dict[str, Any]:
    is_inside = np.full(len(x), True)
    if start is not None:
        is_inside &= x >= start
    if stop is not None:
        is_inside &= x <= stop
    is_number = np.isfinite(y)
    if 2 * is_number.sum() < len(y) or _SOURCE.match(name):  # in some steps only: joined by lines, without gaps
        is_inside &= is_number
    x, y = x[is_inside], y[is_inside]
    kept = downsample(y, points)
    means = bucket_means(y, points)[kept] if len(kept) < len(y) else None
    total = int(np.isfinite(y).sum())  # before downsampling
    return {"run": run, "name": name, "x": x[kept], "y": y[kept], "total": total, "means": means}


def _csv_line(cells: Sequence[str]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(cells)
    return file.getvalue()
