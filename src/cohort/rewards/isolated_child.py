"""What runs in the child process of an isolated reward: load the user's function, call it, and return plain values."""

import traceback
from collections import Counter
from collections.abc import Awaitable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from cohort.config.user_code import load_function
from cohort.errors import UserError, describe_error
from cohort.rewards.call import MissedDeadline, as_list, as_number, call_sync, describe_value, function_error
from cohort.rewards.caught import REPEATS, Caught, caught_exceptions, first_few, is_constant
from cohort.rewards.function import (
    ChecksArguments,
    RewardFunction,
    RewardLog,
    TrainerProgress,
    is_async,
    keyword_parameters,
    name_of,
    reports_of,
)

_MAX_TRACEBACK_CHARACTERS = 20_000
_called: set[str] = set()  # functions that have been called before


def describe(use: str, field: str) -> dict[str, Any]:
    """Load the function and describe its signature; `error` if it cannot be used."""
    with suppress(OSError):  # if memory runs out, the kernel ends this process before the run's
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        function = load_function(use, field=field)
        parameters = keyword_parameters(function)
    except UserError as error:
        return {"error": str(error)}
    except ValueError as error:
        return {"error": f"{field}: the signature of reward {use!r} cannot be read ({error}); wrap it in a `def`"}
    return {
        "name": name_of(function),
        "names": sorted(parameters.names),
        "required": parameters.required,
        "positional_only": parameters.positional_only,
        "has_var_keyword": parameters.has_var_keyword,
        "shapes": bool(reports_of(function).shapes),
        "checks": isinstance(function, ChecksArguments),
    }


def score(
    use: str,
    field: str,
    name: str,
    arguments: Mapping[str, Any],
    count: int,
    progress: TrainerProgress,
    timeout_s: float,
) -> dict[str, Any] | Awaitable[dict[str, Any]]:
    """Call the function and return its values: numbers, None, or a description of anything else.

    Args:
        use: path of the function.
        field: name of the path in messages.
        name: name of the reward in messages.
        arguments: what the run passes to it, less TRL's.
        count: number of completions.
        progress: TRL's `trainer_state`.
        timeout_s: deadline of the call. A function that is asynchronous, or cannot be interrupted, is ended by the run.
    """
    function = load_function(use, field=field)
    parameters, log = keyword_parameters(function), RewardLog()
    given = {n: value for n, value in log.arguments(progress).items() if parameters.accepts(n)}
    reward = RewardFunction(name=name, function=function, timeout_s=timeout_s)
    call = _Call(reward, {**arguments, **given}, count, log)
    return call.run_async() if is_async(function) else call.run()


class _Call:
    """One call, and what the run learns of it."""

    def __init__(self, reward: RewardFunction, arguments: dict[str, Any], count: int, log: RewardLog):
        self._reward = reward
        self._arguments = arguments
        self._count = count
        self._log = log
        self._is_first = reward.name not in _called
        _called.add(reward.name)
        watches = self._is_first and not REPEATS
        self._watch: AbstractContextManager[Caught] = caught_exceptions() if watches else nullcontext(Counter())

    def run(self) -> dict[str, Any]:
        """Call a synchronous function, in the main thread."""
        try:
            with self._watch as caught:
                returned = call_sync(self._reward, self._arguments)
            result, count = self._result(returned), self._count
            if self._repeats(result):
                few, count = first_few(self._arguments, count)
                with suppress(UserError), caught_exceptions() as caught:
                    call_sync(self._reward, few)
            return result | _describe_caught(caught, count)
        except MissedDeadline as error:
            return {"not_judged": str(error).replace(f"reward {self._reward.name!r}", "it", 1)}
        except UserError as error:
            return self._failure(error)

    async def run_async(self) -> dict[str, Any]:
        """Await an asynchronous function."""
        try:
            with self._watch as caught:
                returned = as_list(await self._reward.function(**self._arguments), self._count)
            result, count = self._result(returned), self._count
            if self._repeats(result):
                few, count = first_few(self._arguments, count)
                with suppress(Exception), caught_exceptions() as caught:
                    await self._reward.function(**few)
            return result | _describe_caught(caught, count)
        except BaseException as error:
            return self._failure(function_error(self._reward, error, self._arguments))

    def _repeats(self, result: Mapping[str, Any]) -> bool:
        """Whether to call the function again, to see what it catches."""
        return REPEATS and self._is_first and is_constant(result["values"] or ())

    def _result(self, returned: Any) -> dict[str, Any]:
        values = [_plain(value) for value in returned] if isinstance(returned, list) else None
        return {
            "values": values,
            "kind": describe_value(returned) if values is None else "",
            "metrics": self._log.metrics,
            "details": self._log.details(self._count),
        }

    def _failure(self, error: UserError) -> dict[str, Any]:
        cause = error.__cause__
        if isinstance(cause, SystemExit | KeyboardInterrupt):
            return {"not_judged": f"it called {describe_error(cause)}"}
        frames = "".join(traceback.format_exception(cause or error))[-_MAX_TRACEBACK_CHARACTERS:]
        return {"error": str(error), "traceback": frames}


def _describe_caught(caught: Caught, count: int) -> dict[str, Any]:
    return {"caught": [[*key, number] for key, number in caught.items()], "num_watched": count}


def _plain(value: Any) -> float | dict[str, str] | None:
    """Return a number or None; for anything else its description."""
    if value is None:
        return None
    number = as_number(value)
    return {"kind": describe_value(value)} if number is None else number
