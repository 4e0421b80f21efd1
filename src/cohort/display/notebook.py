"""Progress in a notebook: one line of state and curves, updated in place."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cohort.config import Config
from cohort.display.console import ConsoleDisplay
from cohort.plan import RunSchedule
from cohort.records import ScoredGroup
from cohort.run.history import History
from cohort.run.log import Display, StepReport

_DRAW_EVERY_S = 1.0  # reading the metrics of a long run takes time


def default_display(config: Config) -> Display:
    """Return the display for where this process runs: a notebook's cell, or the console."""
    if "ipykernel" in sys.modules:
        return NotebookDisplay(Path(config.run.dir))
    return ConsoleDisplay(show_completions_every=config.run.show_completions_every)


class NotebookDisplay(Display):
    """Shows progress and curves in the output of the running cell, in place of one line per step."""

    def __init__(self, run_dir: Path):
        """Create a display of the run in a folder."""
        self._run_dir = run_dir
        self._handle: Any = None
        self._cell: object = None  # that has the output
        self._steps_done = self._num_steps = 0
        self._notes: list[str] = []
        self._progress = ""
        self._curves = ""
        self._drawn = -math.inf  # time of the last curves

    def started(self, schedule: RunSchedule, *, steps_done: int) -> None:
        """Show the number of steps."""
        self._steps_done, self._num_steps = steps_done, schedule.num_steps
        self._progress = f"step {steps_done} of {schedule.num_steps}"
        self._update()

    def notify(self, text: str) -> None:
        """Show a line."""
        self._update(note=text)

    def phase(self, name: str) -> None:
        """Show what takes long between steps."""
        is_end = self._steps_done == self._num_steps  # nothing says when the trained model is saved
        if name == "evaluation" or (name == "checkpoint" and not is_end):
            self._update(f"; {name}")

    def step(self, report: StepReport) -> None:
        """Show the step's reward, and the curves so far."""
        self._steps_done = report.steps_done
        self._progress = f"step {report.steps_done} of {self._num_steps}: reward {report.metrics['reward']:.3f}"
        self._update()

    def saved(self, steps_done: int) -> None:
        """Show that the run goes on."""
        self._update()

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Show the accuracy."""
        self.notify(f"held-out accuracy {metrics['eval/accuracy']:.1%} after step {steps_done}")

    def _update(self, doing: str = "", *, note: str | None = None) -> None:
        from IPython import get_ipython
        from IPython.display import HTML, display

        shell = get_ipython()
        cell = None if shell is None else shell.execution_count
        if cell != self._cell:  # the run goes on in another cell
            self._handle, self._cell, self._notes = None, cell, []
        if note is not None:
            self._notes.append(note)
        if time.monotonic() - self._drawn > _DRAW_EVERY_S or self._steps_done == self._num_steps:
            self._curves, self._drawn = History(self._run_dir)._repr_html_(), time.monotonic()
        notes = "".join(f"<div>{escape(text)}</div>" for text in self._notes)
        page = HTML(f"{notes}<div><b>{escape(self._progress + doing)}</b></div>{self._curves}")
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
