"""Console display of a run."""

from cohort.display.console import ConsoleDisplay, ProgressBar, on_one_line, render_curve
from cohort.run.log import Display, Displays, RunLog, StepReport

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
