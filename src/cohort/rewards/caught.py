"""Exceptions that a user's reward function caught: often why it gives all completions the same value."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from cohort.user_code import is_user_code, user_line

Caught = Counter[tuple[str, str]]  # by type and `file:line`
_NAME = "cohort rewards"
_NO_ERRORS = (StopIteration, StopAsyncIteration, GeneratorExit)


@contextmanager
def caught_exceptions() -> Iterator[Caught]:
    """Count the exceptions that user code catches within the context, in this thread at least."""
    caught: Caught = Counter()
    watch = _monitored if sys.version_info >= (3, 12) else _traced
    with watch(lambda error: _count(caught, error)):
        yield caught


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


def _count(caught: Caught, error: BaseException) -> None:
    if not isinstance(error, _NO_ERRORS):
        line = user_line(traceback.extract_tb(error.__traceback__)) or "an unknown line"
        caught[type(error).__name__, line] += 1


@contextmanager
def _monitored(on_caught: Callable[[BaseException], None]) -> Iterator[None]:
    """Watch by `sys.monitoring` (from Python 3.12 on), which costs nothing where nothing is raised."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
    if tool is None:  # other tools watch this process already
        yield
        return

    def handled(code: CodeType, _offset: int, error: BaseException) -> None:
        if is_user_code(code.co_filename):
            on_caught(error)

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
def _traced(on_caught: Callable[[BaseException], None]) -> Iterator[None]:
    """Watch by `sys.settrace`, which slows down every call of a function."""
    raised: dict[int, BaseException] = {}  # kept alive, so that ids stay theirs

    def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not is_user_code(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        return on_event

    def on_event(_frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            raised.setdefault(id(argument[1]), argument[1])
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
    for error in raised.values():  # all of them were caught, or the line above would not be reached
        on_caught(error)
