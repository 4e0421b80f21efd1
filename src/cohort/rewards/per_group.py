"""Rewards that score each group by itself: what a rank is asked to score, and what it returns.

Rank 0 sends completions and the columns that a reward reads, groups kept whole. Values do not depend on which rank a
group is sent to: functions of users are called once for each group, and built-in ones judge completions one by one.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol

from cohort.errors import UserError
from cohort.ranks.stopping import NEVER_STOPPED, StopSignals
from cohort.rewards.builtin import BuiltinReward
from cohort.rewards.call import AsyncCaller, MissedDeadline, NotANumber, as_number, call_sync, describe_value
from cohort.rewards.function import (
    RewardFunction,
    RewardLog,
    TrainerProgress,
    is_async,
    keyword_parameters,
    reports_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """Calls of a reward on one rank: one for each group, or one for all of them if it is built in."""

    index: int  # of the reward in the run
    name: str  # of the reward in the run, where no two have the same
    arguments: Sequence[Mapping[str, Any]]  # of each call, without TRL's and the reward's own
    counts: Sequence[int]  # completions of each call


@dataclass(slots=True, kw_only=True)
class GroupValues:
    """What calls of a reward returned on one rank."""

    values: list[Any] = field(default_factory=list)  # of each call: a list of numbers and None, unless it is invalid
    details: list[Mapping[str, Sequence[str | None]]] = field(default_factory=list)  # of each call, by column
    metrics: list[Mapping[str, list[float]]] = field(default_factory=list)  # of each call, by name
    event_counts: Counter[str] = field(default_factory=Counter)  # completions by what is noteworthy
    warnings: list[str] = field(default_factory=list)
    error: str | None = None  # the run ends with it
    traceback: str = ""  # of an exception of the user's function


class GroupScorer:
    """Calls rewards that score each group by itself, on one rank."""

    def __init__(self, load: Callable[[], Mapping[int, RewardFunction]]) -> None:
        """Create a scorer; `load` returns these rewards by their index in the run, when the first is called."""
        self._load = load
        self._async_caller = AsyncCaller()

    @cached_property
    def _functions(self) -> Mapping[int, RewardFunction]:
        return self._load()

    def score(
        self, calls: Sequence[GroupCalls], progress: TrainerProgress, *, stop: StopSignals = NEVER_STOPPED
    ) -> list[GroupValues]:
        """Call rewards one after another, up to the first that fails.

        Raises:
            StopRequested: the run was asked to stop.
        """
        returned: list[GroupValues] = []
        for call in calls:
            returned.append(GroupValues())
            try:
                reward = replace(self._functions[call.index], name=call.name)
                self._score(reward, call, progress, stop, returned[-1])
            except UserError as error:
                returned[-1].error = str(error)
                if error.__cause__ is not None and not isinstance(error.__cause__, UserError):
                    returned[-1].traceback = "".join(traceback.format_exception(error.__cause__))
                break
        return returned

    def _score(
        self,
        reward: RewardFunction,
        calls: GroupCalls,
        progress: TrainerProgress,
        stop: StopSignals,
        returned: GroupValues,
    ) -> None:
        """Call a reward, and add what it returns.

        Raises:
            UserError: it raised, or missed its deadline, which is for all calls together.
        """
        if isinstance(reward.function, BuiltinReward):
            for arguments, count in zip(calls.arguments, calls.counts, strict=True):
                _add(returned, reward, call_sync(reward, arguments, stop=stop), count, RewardLog())
            return
        parameters, logs = keyword_parameters(reward.function), [RewardLog() for _ in calls.counts]
        complete: list[dict[str, Any]] = []
        for arguments, log in zip(calls.arguments, logs, strict=True):
            trl = {name: value for name, value in log.arguments(progress).items() if parameters.accepts(name)}
            complete.append({**arguments, **trl, **reward.args})
        if is_async(reward.function):
            values = self._async_caller.call_all([(reward, arguments) for arguments in complete], stop=stop)
            for of_call, count, log in zip(values, calls.counts, logs, strict=True):
                _add(returned, reward, of_call, count, log)
            return
        end = monotonic() + reward.timeout_s
        for arguments, count, log in zip(complete, calls.counts, logs, strict=True):
            timed = replace(reward, timeout_s=max(0.001, end - monotonic()))
            try:
                _add(returned, reward, call_sync(timed, arguments, stop=stop), count, log)
            except MissedDeadline as error:  # names the deadline of the configuration, of which this call had a part
                text = str(error).replace(f"{timed.timeout_s:g} s", f"{reward.timeout_s:g} s", 1)
                raise MissedDeadline(text) from None


def _add(returned: GroupValues, reward: RewardFunction, values: Any, count: int, log: RewardLog) -> None:
    """Add what one call returned, and what the function tells beside it."""
    reports = reports_of(reward.function)
    returned.values.append(
        [_plain(value) for value in values] if isinstance(values, list) else NotANumber(describe_value(values))
    )
    returned.details.append(details_of(reward, log, count))
    returned.metrics.append(log.metrics)
    returned.event_counts.update(reports.last_counts)
    returned.warnings += reports.last_warnings


def _plain(value: Any) -> float | NotANumber | None:
    """Return a number or None; for anything else its description, which every process can read."""
    if value is None:
        return None
    number = as_number(value)
    return NotANumber(describe_value(value)) if number is None else number


def details_of(reward: RewardFunction, log: RewardLog, count: int) -> dict[str, Sequence[str | None]]:
    """Return what a function tells of each of its `count` completions, by column.

    Raises:
        UserError: it logged another number of values.
    """
    details: dict[str, Sequence[str | None]] = {}
    of_function = reports_of(reward.function).last_details
    if isinstance(of_function, Mapping):
        details |= {f"{reward.name}/{key}": values for key, values in of_function.items()}
    elif of_function is not None:
        details[reward.name] = of_function
    try:
        return details | log.details(count)
    except UserError as error:
        raise UserError(f"reward {reward.name!r}: {error}") from error


def is_per_group(reward: RewardFunction) -> bool:
    """Whether a reward scores each group by itself, so that any rank can."""
    function = reward.function
    return function.per_group if isinstance(function, BuiltinReward) else reward.per_group


class OnRanks(Protocol):
    """The ranks that call rewards which score each group by itself."""

    @property
    def count(self) -> int:
        """Number of shares."""
        ...

    def __call__(self, shares: Sequence[Sequence[GroupCalls]], progress: TrainerProgress) -> list[list[GroupValues]]:
        """Make the calls of each rank's share, and return what they returned, in order."""
        ...


class OnThisRank:
    """This process alone."""

    count = 1

    def __init__(self, scorer: GroupScorer, stop: Callable[[], StopSignals]) -> None:
        """Create it; `stop` returns whether the run should stop."""
        self._scorer = scorer
        self._stop = stop

    def __call__(self, shares: Sequence[Sequence[GroupCalls]], progress: TrainerProgress) -> list[list[GroupValues]]:
        """See `OnRanks`."""
        return [self._scorer.score(shares[0], progress, stop=self._stop())]


def split_evenly(count: int, num_ranks: int) -> list[range]:
    """Return the groups of each rank: consecutive ones, as completions are sampled."""
    bounds = [count * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def raise_first(returned: Iterable[GroupValues]) -> None:
    """Raise the first error of calls, with its traceback as the cause.

    Raises:
        UserError: one failed.
    """
    for values in returned:
        if values.error is not None:
            cause = RuntimeError(values.traceback) if values.traceback else None
            raise UserError(values.error) from cause
