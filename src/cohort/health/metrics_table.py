"""Metrics of a run as columns that grow row by row."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from cohort.records import FloatArray, IntArray

_FIRST_CAPACITY = 256


class MetricsTable:
    """Metrics of one kind by step: a snapshot that does not change.

    Attributes:
        steps: [rows] increasing.
        names: metrics with at least one number.
        eval: the metrics of evaluations, as another table; empty in a table of evaluations.
    """

    def __init__(self, steps: IntArray, columns: Mapping[str, FloatArray], eval_table: "MetricsTable | None" = None):
        self.steps = steps
        self._columns = columns
        self._eval = eval_table

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of the file."""
        return [name for name in self._columns if name != "timestamp"]

    @property
    def timestamps(self) -> FloatArray:
        """[rows] Unix seconds at which the rows were written; NaN in files of versions that did not write them."""
        return self.column("timestamp")

    @property
    def eval(self) -> "MetricsTable":
        """The metrics of evaluations."""
        return self._eval if self._eval is not None else MetricsTable(np.empty(0, np.int64), {})

    def column(self, name: str) -> FloatArray:
        """[rows] values of a metric; NaN where it is missing, everywhere if the run does not have it."""
        column = self._columns.get(name)
        return np.full(len(self.steps), np.nan) if column is None else column[: len(self.steps)]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric that is a number; None if there is none."""
        values = self.column(name)
        found = np.flatnonzero(np.isfinite(values))
        return float(values[found[-1]]) if len(found) else None

    def row(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; empty if there are none."""
        place = np.searchsorted(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            return {}
        return {
            name: float(self._columns[name][place]) for name in self.names if np.isfinite(self._columns[name][place])
        }


class TableBuilder:
    """Grows columns row by row. Arrays handed out in a table are never changed: rows are written behind them."""

    def __init__(self) -> None:
        self._num = 0
        self._steps = np.empty(_FIRST_CAPACITY, np.int64)
        self._columns: dict[str, FloatArray] = {}

    def append(self, steps: IntArray, names: Sequence[str], values: FloatArray) -> None:
        """Append rows. The last row of a step replaces earlier ones, which an interrupted run wrote.

        Args:
            steps: [rows], at least one.
            names: metrics.
            values: [rows, metrics]; values that are not finite count as missing.
        """
        end = self._num + len(steps)
        if end > len(self._steps):
            self._copy(np.arange(self._num), max(end, 2 * len(self._steps)))
        in_order = bool((np.diff(steps) > 0).all()) and (self._num == 0 or steps[0] > self._steps[self._num - 1])
        is_finite = np.isfinite(values)
        values, known = np.where(is_finite, values, np.nan), set(np.flatnonzero(is_finite.any(axis=0)).tolist())
        self._steps[self._num : end] = steps
        for i, name in enumerate(names):
            if name not in self._columns:
                if i not in known:
                    continue
                self._columns[name] = np.full(len(self._steps), np.nan)
            self._columns[name][self._num : end] = values[:, i]
        self._num = end
        if not in_order:
            self._keep_last_of_step()

    def table(self, eval_table: MetricsTable | None = None) -> MetricsTable:
        """Return a snapshot."""
        return MetricsTable(self._steps[: self._num], dict(self._columns), eval_table)

    def _keep_last_of_step(self) -> None:
        _, from_end = np.unique(self._steps[: self._num][::-1], return_index=True)
        rows = self._num - 1 - from_end
        self._copy(rows, max(len(rows), _FIRST_CAPACITY))
        self._num = len(rows)

    def _copy(self, rows: IntArray, capacity: int) -> None:
        """Move `rows` to new arrays of `capacity`."""
        steps = np.empty(capacity, np.int64)
        steps[: len(rows)] = self._steps[rows]
        self._steps = steps
        for name, old in self._columns.items():
            self._columns[name] = np.full(capacity, np.nan)
            self._columns[name][: len(rows)] = old[rows]


class MetricsBuilder:
    """The tables of a run's metrics under construction."""

    def __init__(self) -> None:
        self._kinds = {"train": TableBuilder(), "eval": TableBuilder()}

    def append(self, rows: Sequence[Any]) -> list[bool]:
        """Append rows of metrics.jsonl. Values that are no numbers count as missing.

        Returns:
            Whether each is a row; others are left out.
        """
        for kind, builder in self._kinds.items():
            of_kind = [row for row in rows if _is_row(row) and (row.get("kind") == "eval") == (kind == "eval")]
            for run in _runs_of_same_keys(of_kind):
                names = [name for name in run[0] if name not in ("step", "kind")]
                values = _to_array([[row[name] for name in names] for row in run])
                builder.append(np.array([row["step"] for row in run]), names, values)
        return [_is_row(row) for row in rows]

    def table(self) -> MetricsTable:
        """Return a snapshot of the training metrics, which holds that of the evaluations."""
        return self._kinds["train"].table(self._kinds["eval"].table())


def _is_row(row: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a line of metrics.jsonl is a row: an object with a step."""
    return isinstance(row, Mapping) and type(step := row.get("step")) is int and 0 <= step < 2**53


def _runs_of_same_keys(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Split rows into runs of neighbors with the same keys in the same order."""
    run: list[Mapping[str, Any]] = []
    keys: list[str] = []
    for row in rows:
        found = list(row)
        if run and found != keys:
            yield run
            run = []
        keys = found
        run.append(row)
    if run:
        yield run


def _to_array(values: list[list[Any]]) -> FloatArray:
    """[rows, columns] float64; NaN for whatever is no number."""
    try:
        array = np.array(values, np.float64)
        if array.ndim == 2:
            return array
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([[_number(value) for value in row] for row in values], np.float64).reshape(len(values), -1)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
