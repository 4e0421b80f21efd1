"""Console display of a run."""

from cohort.display.console import ConsoleDisplay, ProgressBar, on_one_line
from cohort.display.curve import render_curve
from cohort.display.events import Display, Displays, StepReport
from cohort.display.run_log import RunLog

__all__ = [
    "ConsoleDisplay",
    "Display",
    "Displays",
    "ProgressBar",
    "RunLog",
    "StepReport",
    "on_one_line",
    "render_curve",
]
