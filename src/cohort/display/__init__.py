"""Console display of a run."""

from cohort.display.console import ConsoleDisplay, ProgressBar, on_one_line
from cohort.display.curve import render_curve
from cohort.display.events import Display, StepReport

__all__ = ["ConsoleDisplay", "Display", "ProgressBar", "StepReport", "on_one_line", "render_curve"]
