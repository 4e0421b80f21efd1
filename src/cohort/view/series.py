"""Curves: metrics of runs over steps or wall time, with few points, and as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np

from cohort.view.marks import Axis, marks
from cohort.view.metric_names import description_of, group_of, unit_of
from cohort.view.metrics_table import MetricsTable
from cohort.view.records import Curve, Curves, FloatArray, IntArray, MetricInfo, MetricList
from cohort.view.run import ViewedRun
from cohort.view.wall_time import WallTime

_MOST_REGULAR_MARKS = 200  # so many checkpoints or evaluations say nothing on a chart


def curves(
    runs: Sequence[ViewedRun],
    names: Sequence[str],
    x: Axis = "step",
    start: float | None = None,
    stop: float | None = None,
    points: int = 800,
) -> Curves:
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
    return Curves(curves=found, marks={run.id: marks(run, x, most=_MOST_REGULAR_MARKS) for run in runs})


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


def metrics_list(run: ViewedRun) -> MetricList:
    """Return the metrics that a run has, in the order of its file."""
    found = []
    for kind, table in (("train", run.metrics), ("eval", run.metrics.eval)):
        for name in table.names:
            found.append(
                MetricInfo(
                    name=name,
                    group=group_of(name),
                    kind="eval" if kind == "eval" else "train",
                    unit=unit_of(name),
                    description=description_of(name),
                    last=table.last(name),
                    num_points=int(np.isfinite(table.column(name)).sum()),
                )
            )
    return MetricList(metrics=found)


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
) -> Curve:
    is_inside = np.full(len(x), True)
    if start is not None:
        is_inside &= x >= start
    if stop is not None:
        is_inside &= x <= stop
    is_number = np.isfinite(y)
    if 2 * is_number.sum() < len(y):  # reported in some steps only: those are joined by lines, without gaps
        is_inside &= is_number
    x, y = x[is_inside], y[is_inside]
    kept = downsample(y, points)
    means = bucket_means(y, points)[kept] if len(kept) < len(y) else None
    return Curve(run=run, name=name, x=x[kept], y=y[kept], total=int(np.isfinite(y).sum()), means=means)


def _csv_line(cells: Sequence[str]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(cells)
    return file.getvalue()
