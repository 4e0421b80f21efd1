"""Calls reward functions under deadlines, so that a hang is an error and never a hang of the run.

Sync functions run one after the other, each in its own daemon thread. Async functions run together in one event loop
that lives as long as the runner, so that a client which a function keeps between steps stays usable.
"""

import asyncio
import contextlib
import faulthandler
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Literal

from cohort import stopping
from cohort.errors import StopRequested, UserError
from cohort.rewards.function import RewardFunction
from cohort.user_code import raised_at, user_line, words_of

_LOOP_GRACE_S = 1.0  # for an event loop to report that a deadline has passed, before it counts as blocked
_INTERPRETER_GRACE_S = 60.0  # for a thread to report that a deadline has passed, before the process is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How one call ended."""

    kind: Literal["returned", "raised", "late"]
    value: Any = None  # returned: the value; raised: the exception; late: the line it was at, or None


def call_sync(reward: RewardFunction, arguments: Mapping[str, Any], on_thread_start: Callable[[], None] | None) -> Any:
    """What `reward.function(**arguments)` returns.

    Args:
        reward: has a sync function.
        arguments: all of its keyword arguments.
        on_thread_start: called first in the function's thread.

    Raises:
        UserError: the function raised, or did not return within `reward.timeout_s`.
        StopRequested: the run was asked to end; the function is left alone.
    """
    outcomes: list[_Outcome] = []
    ended = threading.Event()

    def work() -> None:
        try:
            if on_thread_start is not None:
                on_thread_start()
            outcomes.append(_Outcome(kind="returned", value=reward.function(**arguments)))
        except BaseException as error:  # SystemExit too: the thread would swallow it
            outcomes.append(_Outcome(kind="raised", value=error))
        finally:
            ended.set()

    _show_in_stacks(work, reward)
    thread = threading.Thread(target=work, name=f"reward {reward.name}", daemon=True)
    with _interpreter_watchdog(reward.timeout_s + _INTERPRETER_GRACE_S):
        thread.start()
        stopping.patiently(ended.wait, reward.timeout_s)
    outcome = outcomes[0] if outcomes else _Outcome(kind="late", value=_line_of_thread(thread))
    return _value_of(reward, outcome)


class AsyncCaller:
    """One event loop in a daemon thread, started at the first call and stopped with this object."""

    def __init__(self, on_thread_start: Callable[[], None] | None = None) -> None:
        """Starts nothing yet.

        Args:
            on_thread_start: called first in the loop's thread.
        """
        self._on_thread_start = on_thread_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call_all(self, calls: Sequence[tuple[RewardFunction, Mapping[str, Any]]]) -> list[Any]:
        """What each async function returns; they run together.

        Raises:
            UserError: a function raised, did not finish within its `timeout_s`, or blocked the loop.
            StopRequested: the run was asked to end.
        """
        loop, thread = self._running_loop()
        longest_s = max(reward.timeout_s for reward, _ in calls)
        with _interpreter_watchdog(longest_s + _INTERPRETER_GRACE_S):
            future = asyncio.run_coroutine_threadsafe(_run_together(calls), loop)
            try:
                came = stopping.patiently(lambda s: bool(wait([future], s).done), longest_s + _LOOP_GRACE_S)
            except StopRequested:
                future.cancel()
                raise
            if not came:
                # Nothing came back although every task has its own deadline: one of them blocks the loop.
                names = ", ".join(repr(reward.name) for reward, _ in calls)
                raise UserError(
                    f"async reward {names}: not finished within the deadline of {longest_s:g} s "
                    f"(rewards[i].timeout_s), because the event loop is blocked{_at(_line_of_thread(thread))}. "
                    "An async function must await what takes long; make it a plain `def` otherwise."
                )
        outcomes = future.result()
        return [_value_of(reward, outcome) for (reward, _), outcome in zip(calls, outcomes, strict=True)]

    def _running_loop(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        if self._loop is None or self._thread is None:
            loop = asyncio.new_event_loop()
            # Every outcome is collected below. What is left to report is a late function that would not be cancelled
            # and is still pending when the process ends, which has been an error long before.
            loop.set_exception_handler(lambda _loop, _context: None)
            on_thread_start = self._on_thread_start

            def work() -> None:
                if on_thread_start is not None:
                    on_thread_start()
                loop.run_forever()
                loop.close()

            self._loop, self._thread = loop, threading.Thread(target=work, name="async rewards", daemon=True)
            self._thread.start()
            weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        return self._loop, self._thread


async def _run_together(calls: Sequence[tuple[RewardFunction, Mapping[str, Any]]]) -> list[_Outcome]:
    return await asyncio.gather(*(_run_one(reward, arguments) for reward, arguments in calls))


async def _run_one(reward: RewardFunction, arguments: Mapping[str, Any]) -> _Outcome:
    async def guarded() -> _Outcome:
        try:
            return _Outcome(kind="returned", value=await reward.function(**arguments))
        except BaseException as error:  # SystemExit would end the loop
            return _Outcome(kind="raised", value=error)

    _show_in_stacks(guarded, reward)
    task = asyncio.create_task(guarded())
    # Not asyncio.wait_for: its TimeoutError looks like one that the function raised, and it waits for a task that
    # does not let itself be cancelled.
    done, _ = await asyncio.wait({task}, timeout=reward.timeout_s)
    if done:
        return task.result()
    line = _line_of_coroutine(task.get_coro())
    task.cancel()
    return _Outcome(kind="late", value=line)


def _value_of(reward: RewardFunction, outcome: _Outcome) -> Any:
    if outcome.kind == "returned":
        return outcome.value
    if outcome.kind == "late":
        raise UserError(
            f"reward {reward.name!r}: not finished within its deadline of {reward.timeout_s:g} s"
            f"{_at(outcome.value)}. Make it faster, or raise rewards[i].timeout_s."
        )
    error = outcome.value
    if isinstance(error, UserError):  # a built-in reward: its text is complete
        raise UserError(f"reward {reward.name!r}: {error}") from error
    raise UserError(f"reward {reward.name!r} raised {words_of(error)} (at {raised_at(error)})") from error


def _at(line: str | None) -> str:
    return f"; it was at {line}" if line else ""


def _show_in_stacks(caller: Any, reward: RewardFunction) -> None:
    """Name the reward in the stacks of faulthandler, which are all that is left of a process that it ends."""
    caller.__code__ = caller.__code__.replace(co_name=f"reward {reward.name!r}")


def _line_of_thread(thread: threading.Thread) -> str | None:
    frame = sys._current_frames().get(thread.ident or -1)
    return None if frame is None else user_line(traceback.extract_stack(frame))


def _line_of_coroutine(coroutine: Any) -> str | None:
    """Where a suspended coroutine is; a task's own stack shows the outermost frame only."""
    frames: list[traceback.FrameSummary] = []
    while getattr(coroutine, "cr_frame", None) is not None:
        frames += traceback.extract_stack(coroutine.cr_frame, limit=1)
        coroutine = coroutine.cr_await
    return user_line(frames)


@contextlib.contextmanager
def _interpreter_watchdog(limit_s: float) -> Iterator[None]:
    """Ends the process with a traceback of every thread if the interpreter itself stands still for `limit_s`.

    A regular expression that backtracks for ever, or an extension that keeps the interpreter lock, stops every
    thread, the one that watches the deadline included. Only a timer outside of the interpreter can end that.
    """
    if sys.__stderr__ is None:
        yield
        return
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
