"""Console display of a run."""

from cohort.display.console import ConsoleDisplay, ProgressBar, on_one_line, render_curve
from cohort.display.notebook import default_display
from cohort.run.log import Display, Displays, RunLog, StepReport

__all__ = [
    "ConsoleDisplay",
    "Display",
    "Displays",
    "ProgressBar",
    "RunLog",
    "StepReport",
    "default_display",
    "on_one_line",
    "render_curve",
]
