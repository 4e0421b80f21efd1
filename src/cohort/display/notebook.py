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
    """Shows progress and curves in the output of a cell, in place of one line per step."""

    def __init__(self, run_dir: Path):
        """Create a display of the run in a folder."""
        self._run_dir = run_dir
        self._handle: Any = None
        self._num_steps = 0
        self._notes: list[str] = []
        self._state = ""
        self._drawn = -math.inf  # time of the last curves

    def started(self, schedule: RunSchedule, *, steps_done: int) -> None:
        """Show the number of steps."""
        self._num_steps = schedule.num_steps
        self._update(f"step {steps_done} of {schedule.num_steps}")

    def notify(self, text: str) -> None:
        """Show a line."""
        self._notes.append(text)
        self._update(self._state)

    def phase(self, name: str) -> None:
        """Show what takes long between steps."""
        if name in ("evaluation", "checkpoint"):
            self._update(f"{self._state.partition(';')[0]}; {name}")

    def step(self, report: StepReport) -> None:
        """Show the step's reward, and the curves so far."""
        self._state = f"step {report.steps_done} of {self._num_steps}: reward {report.metrics['reward']:.3f}"
        if time.monotonic() - self._drawn > _DRAW_EVERY_S or report.steps_done == self._num_steps:
            self._update(self._state)

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Show the accuracy."""
        self.notify(f"held-out accuracy {metrics['eval/accuracy']:.1%} after step {steps_done}")

    def _update(self, state: str) -> None:
        from IPython.display import HTML, display

        self._state, self._drawn = state, time.monotonic()
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        page = HTML(f"{notes}<div><b>{escape(state)}</b></div>{History(self._run_dir)._repr_html_()}")
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
