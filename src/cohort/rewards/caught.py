"""Exceptions that a user's reward function caught: often why it gives all completions the same value."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from cohort.config.user_code import is_user_code, user_line
from cohort.rewards.function import RewardLog

Caught = Counter[tuple[str, str]]  # by type and `file:line`
# before Python 3.12, watching slows a function down so much that its time limits may change its values
REPEATS = sys.version_info < (3, 12)
_NUM_REPEATED = 8  # completions
_NAME = "cohort rewards"
_NO_ERRORS = (StopIteration, StopAsyncIteration, GeneratorExit)


@contextmanager
def caught_exceptions() -> Iterator[Caught]:
    """Count the exceptions that user code catches within the context, in this thread at least."""
    caught: Caught = Counter()
    seen: dict[int, BaseException] = {}  # kept alive, so that ids stay theirs; an exception may be raised again
    watch = _traced if REPEATS else _monitored
    with watch(lambda error: seen.setdefault(id(error), error)):
        yield caught
    for error in seen.values():  # all of them were caught, or the lines above would not be left in this way
        if not isinstance(error, _NO_ERRORS):
            line = user_line(traceback.extract_tb(error.__traceback__)) or "an unknown line"
            caught[type(error).__name__, line] += 1


def first_few(arguments: Mapping[str, Any], count: int) -> tuple[dict[str, Any], int]:
    """Return arguments for a repeated call with the first few of `count` completions, and how many these are.

    What the function logs again is dropped.
    """
    few = {
        name: value[:_NUM_REPEATED] if isinstance(value, list) and len(value) == count else value
        for name, value in arguments.items()
    }
    log = RewardLog()
    few |= {name: getattr(log, name) for name in ("log_metric", "log_extra") if name in few}
    return few, min(count, _NUM_REPEATED)


def is_constant(values: Sequence[Any]) -> bool:
    """Whether there are several values and all are equal, NaN included."""
    return len(values) > 1 and len({repr(value) for value in values}) == 1


def describe_caught(name: str, caught: Caught, num_completions: int, value: float) -> str:
    """Return a warning about a function that gave all completions the same value.

    Args:
        name: name of the reward.
        caught: at least one exception.
        num_completions: of the call, which all got `value`.
        value: NaN if none was scored.
    """
    ((kind, line), count), *others = caught.most_common()
    times = f"{count} times" if count > 1 else "once"
    times = f"for all {num_completions} completions" if count >= num_completions else times
    more = f", and {len(others)} other kinds" if len(others) > 1 else ", and one other kind" if others else ""
    got = "left all of them unscored" if value != value else f"gave {value:g} to each of the {num_completions}"
    return f"warning: reward {name!r} caught {kind} at {line} {times}{more}; it {got}"


@contextmanager
def _monitored(on_error: Callable[[BaseException], Any]) -> Iterator[None]:
    """Watch by `sys.monitoring` (from Python 3.12 on), which costs nothing where nothing is raised."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
    if tool is None:  # other tools watch this process already
        yield
        return

    def handled(code: CodeType, _offset: int, error: BaseException) -> None:
        if is_user_code(code.co_filename):
            on_error(error)

    event = monitoring.events.EXCEPTION_HANDLED
    monitoring.use_tool_id(tool, _NAME)
    monitoring.register_callback(tool, event, handled)
    monitoring.set_events(tool, event)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _traced(on_error: Callable[[BaseException], Any]) -> Iterator[None]:
    """Watch by `sys.settrace`, which slows down every call of a function."""

    def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not is_user_code(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        return on_event

    def on_event(_frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            on_error(argument[1])
        return on_event

    before = sys.gettrace()
    if before is not None:  # a debugger
        yield
        return
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(None)
