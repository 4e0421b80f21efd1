"""The events of a run that can be shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cohort.plan import RunPlan
from cohort.records import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    steps_done: int
    metrics: Mapping[str, float]
    groups: Sequence[ScoredGroup]


class Display:
    """Told of everything that happens in a run, in order. This one shows nothing; others override what they show."""

    def started(self, plan: RunPlan, *, steps_done: int) -> None:
        """The run begins, or goes on after `steps_done` steps."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def eval_progress(self, done: int, total: int) -> None:
        """`done` of `total` prompts are evaluated."""

    def save_progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes of a model are written."""

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """An evaluation is done."""

    def close(self) -> None:
        """Nothing more comes, for whatever reason."""
