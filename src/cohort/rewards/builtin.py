"""Bases of the built-in rewards: settings that the configuration has checked, and what they know of their run."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from cohort.config.rewards import ChoiceSettings, ExactSetSettings, ExactSettings, NumberSettings
from cohort.rewards.completion_text import after_thinking, answer_text, last_match
from cohort.rewards.function import Reports
from cohort.rewards.math_workers import MathWorkers
from cohort.sandbox import SharedSandbox

_BUDGET_SHARE = 0.8  # share of the deadline after which rewards that judge for long leave the rest unscored

Columns = Mapping[str, Sequence[Any]]  # name -> one value for each completion
S = TypeVar("S")
A = TypeVar("A", bound=ChoiceSettings | ExactSettings | ExactSetSettings | NumberSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a built-in reward knows of its run when it is created."""

    max_completion_tokens: int
    sandbox: SharedSandbox
    timeout_s: float = 300.0  # deadline of one call
    device: str = "auto"  # `hardware.device`
    run_folder: Path | None = None  # may not exist yet
    math_workers: MathWorkers = field(default_factory=MathWorkers)  # of all rewards that grade answers
    ask_servers_first: bool = True  # check that a judge's server answers; False: once a reply is not in its cache

    @property
    def budget_s(self) -> float:
        """Seconds for the answers of one call; the rest is not judged."""
        return _BUDGET_SHARE * self.timeout_s


class BuiltinReward(Reports, Generic[S]):
    """A built-in reward. `__call__` names what it needs, and returns one number or None per completion.

    It may name `prompts`, `completions`, `completion_ids`, `trajectories`, and `columns` for those of the dataset.
    """

    __call__: Callable[..., Any]
    per_group: ClassVar[bool] = False  # judges each completion by itself: any rank can, from `required_columns` alone

    def __init__(self, settings: S, context: RewardContext) -> None:
        """Create the reward. What takes long, or needs an optional package, waits for `check` or the first call."""
        self.settings = settings
        self.context = context

    def required_columns(self) -> Sequence[str]:
        """Return the columns of the dataset that the reward needs."""
        return ()

    def check(self) -> None:
        """Check what the settings name: packages, files, servers.

        Raises:
            ValueError: something is missing or cannot be used; the message names the setting, its value and what works.
        """


class AnswerReward(BuiltinReward[A]):
    """Base of rewards that compare a completion's answer, behind the last `</think>`, with a column.

    1.0 if it is right, else 0.0; None if the row has no answer.
    """

    per_group = True

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return (self.settings.answer_column,)

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a value of the answer column is no answer.
        """
        rewards: list[float | None] = []
        for completion, answer in zip(completions, columns[self.settings.answer_column], strict=True):
            text = last_match(self.settings.pattern, after_thinking(answer_text(completion)))
            rewards.append(None if answer is None else float(self.is_right(text, self.gold(answer))))
        return rewards

    def check_row(self, row: Mapping[str, Any]) -> None:
        """See `ChecksRows`."""
        if row.get(self.settings.answer_column) is not None:
            self.gold(row[self.settings.answer_column])

    @abstractmethod
    def gold(self, answer: Any) -> Any:
        """Return the right answer that a value of the column stands for.

        Raises:
            UserError: it stands for none.
        """

    @abstractmethod
    def is_right(self, text: str | None, gold: Any) -> bool:
        """Whether the last match of the pattern, None if there is none, or the text, gives the right answer."""
