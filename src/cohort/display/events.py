"""Interface of displays: the events of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cohort.plan import RunSchedule
from cohort.records import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one step."""

    steps_done: int
    metrics: Mapping[str, float]
    groups: Sequence[ScoredGroup]


class Display:
    """Receives the events of a run in order. The base class ignores them all."""

    def started(self, plan: RunSchedule, *, steps_done: int) -> None:
        """The run starts, or resumes after `steps_done` steps."""

    def notify(self, text: str) -> None:
        """A message for the user."""

    def phase(self, name: str) -> None:
        """A phase of a step begins, as named in the metrics `time/{name}_s`, or "evaluation" or "checkpoint"."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def eval_progress(self, done: int, total: int) -> None:
        """`done` of `total` prompts are evaluated."""

    def reward_progress(self, name: str, done: int, total: int) -> None:
        """`done` of `total` verdicts of a reward are there."""

    def save_progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes of a model are written."""

    def saved(self, steps_done: int) -> None:
        """A checkpoint is written."""

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """An evaluation is done."""

    def close(self) -> None:
        """The run has ended, for whatever reason."""


class Displays(Display):
    """Passes every event on to several displays, in order."""

    def __init__(self, *displays: Display):
        """`displays` are all of one run."""
        for name in vars(Display):
            if not name.startswith("_"):
                setattr(self, name, partial(_call_all, [getattr(display, name) for display in displays]))


def _call_all(methods: Sequence[Callable[..., None]], *arguments: object, **keywords: object) -> None:
    for method in methods:
        method(*arguments, **keywords)
