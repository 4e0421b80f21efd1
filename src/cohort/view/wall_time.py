"""Wall time of a run: when each step was done, in seconds since the run's start."""

import math
from typing import TYPE_CHECKING

import numpy as np

from cohort.view.records import FloatArray

if TYPE_CHECKING:
    from cohort.view.run import ViewedRun


class WallTime:
    """Seconds since the start of a run.

    Runs of versions that wrote no timestamps have the running sum of `step_time` instead, without evaluations.

    Attributes:
        table: the run's metrics at this moment.
        start: Unix seconds; None if unknown.
        train: [rows of the metrics] seconds.
        eval: [rows of the evaluations] seconds.
    """

    def __init__(self, run: "ViewedRun"):
        self.table = table = run.metrics
        times, eval_times = table.timestamps, table.eval.timestamps
        starts = [event.timestamp for event in run.events if event.event == "start" and math.isfinite(event.timestamp)]
        known = [times[:1] - np.nan_to_num(table.column("step_time")[:1]), eval_times[:1]]
        self.start: float | None = min([*starts[:1], *(float(t[0]) for t in known if len(t))], default=None)
        self.is_measured = self.start is not None and bool(
            np.isfinite(times).all() and np.isfinite(eval_times).all() and math.isfinite(self.start)
        )
        if self.is_measured and self.start is not None:
            # never backward, as when the machine's clock was set
            self.train, self.eval = (np.maximum.accumulate(t - self.start) for t in (times, eval_times))
            return
        self.start = starts[0] if starts else None
        self.train = np.cumsum(np.nan_to_num(table.column("step_time")))
        self.eval = self._at_steps(table.eval.steps)

    def at(self, timestamp: float | None, step: int | None) -> float | None:
        """Return the place of an event on the axis; None if it is unknown."""
        if self.is_measured and self.start is not None and timestamp is not None and math.isfinite(timestamp):
            return timestamp - self.start
        return None if step is None else float(self._at_steps(np.array([step]))[0])

    def axis(self, step: int, x: str) -> float | None:
        """Return the place of a step on the axis `step` or `time`."""
        return float(step) if x == "step" else self.at(None, step)

    def _at_steps(self, steps: "np.ndarray") -> FloatArray:
        rows = np.searchsorted(self.table.steps, steps, side="right")
        return np.concatenate(([0.0], self.train))[rows]
