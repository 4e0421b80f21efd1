"""Console display of a run."""

from cohort.display.console import ConsoleDisplay, EvalProgress, on_one_line
from cohort.display.curve import render_curve
from cohort.display.events import Display, StepReport

__all__ = ["ConsoleDisplay", "Display", "EvalProgress", "StepReport", "on_one_line", "render_curve"]
