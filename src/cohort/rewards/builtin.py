"""Base of the built-in rewards: settings that the configuration has checked, and what they know of their run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from cohort.rewards.function import Reports
from cohort.rewards.math_workers import MathWorkers
from cohort.sandbox import SharedSandbox

_BUDGET_SHARE = 0.8  # share of the deadline after which rewards that judge for long leave the rest unscored

Columns = Mapping[str, Sequence[Any]]  # name -> one value for each completion
S = TypeVar("S")


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
