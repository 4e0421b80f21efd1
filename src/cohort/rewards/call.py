"""Call reward functions under deadlines: a function that hangs is an error and never hangs the run.

Sync functions run one after another, each in its own daemon thread. Async functions run concurrently in one event loop
that lives as long as the runner, so that clients which a function keeps between steps stay usable.
"""

import asyncio
import contextlib
import faulthandler
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from cohort import stopping
from cohort.errors import StopRequested, UserError
from cohort.rewards.function import RewardFunction
from cohort.user_code import describe_error, error_location, user_line

_LOOP_GRACE_S = 1.0  # after a deadline, before the event loop is considered blocked
_INTERPRETER_GRACE_S = 60.0  # after a deadline, until the process is ended


def call_sync(reward: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """Return `reward.function(**arguments)`.

    Raises:
        UserError: the function raised, or did not return within `reward.timeout_s`.
        StopRequested: the run was asked to stop; the function is abandoned.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(reward.function(**arguments))
        except BaseException as error:  # SystemExit too: the thread would swallow it
            future.set_exception(error)

    _show_in_stacks(work, reward)
    thread = threading.Thread(target=work, name=f"reward {reward.name}", daemon=True)
    with _interpreter_watchdog(reward.timeout_s + _INTERPRETER_GRACE_S):
        thread.start()
        finished = stopping.wait_or_stop(lambda s: bool(wait([future], s).done), reward.timeout_s)
    if not finished:
        raise _deadline_error(reward, _line_of_thread(thread))
    if error := future.exception():
        raise _function_error(reward, error) from error
    return future.result()


class AsyncCaller:
    """An event loop in a daemon thread, started at the first call and stopped with this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call_all(self, calls: Sequence[tuple[RewardFunction, Mapping[str, Any]]]) -> list[Any]:
        """Run async functions concurrently and return their results.

        Raises:
            UserError: a function raised, missed its `timeout_s`, or blocked the loop.
            StopRequested: the run was asked to stop.
        """
        loop, thread = self._running_loop()
        longest_s = max(reward.timeout_s for reward, _ in calls)
        with _interpreter_watchdog(longest_s + _INTERPRETER_GRACE_S):
            future = asyncio.run_coroutine_threadsafe(_run_together(calls), loop)
            try:
                finished = stopping.wait_or_stop(lambda s: bool(wait([future], s).done), longest_s + _LOOP_GRACE_S)
            except StopRequested:
                future.cancel()
                raise
            if not finished:
                # Every task has its own deadline, so one of them must be blocking the loop.
                names = ", ".join(repr(reward.name) for reward, _ in calls)
                raise UserError(
                    f"async reward {names} did not finish within the deadline of {longest_s:g} s "
                    f"(rewards[i].timeout_s), because the event loop is blocked{_at(_line_of_thread(thread))}; await "
                    f"slow operations, or make the function a plain `def`"
                )
        results = future.result()
        for result in results:
            if isinstance(result, UserError):
                raise result
        return results

    def _running_loop(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        if self._loop is None or self._thread is None:
            loop = asyncio.new_event_loop()
            # Every result is collected below. The handler would only report late functions that ignored cancellation
            # and are pending at exit; they have already raised an error.
            loop.set_exception_handler(lambda _loop, _context: None)

            def work() -> None:
                loop.run_forever()
                loop.close()

            self._loop, self._thread = loop, threading.Thread(target=work, name="async rewards", daemon=True)
            self._thread.start()
            weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        return self._loop, self._thread


async def _run_together(calls: Sequence[tuple[RewardFunction, Mapping[str, Any]]]) -> list[Any]:
    return await asyncio.gather(*(_run_one(reward, arguments) for reward, arguments in calls))


async def _run_one(reward: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """Return the function's result, or the error to raise when the other functions are done."""

    async def guarded() -> Any:
        try:
            return await reward.function(**arguments)
        except BaseException as error:  # SystemExit would end the loop
            return _function_error(reward, error)

    _show_in_stacks(guarded, reward)
    task = asyncio.create_task(guarded())
    # Not asyncio.wait_for: its TimeoutError looks like one raised by the function, and it waits for tasks that ignore
    # cancellation.
    done, _ = await asyncio.wait({task}, timeout=reward.timeout_s)
    if done:
        return task.result()
    line = _line_of_coroutine(task.get_coro())
    task.cancel()
    return _deadline_error(reward, line)


def _deadline_error(reward: RewardFunction, line: str | None) -> UserError:
    return UserError(
        f"reward {reward.name!r} did not finish within its deadline of {reward.timeout_s:g} s{_at(line)}; make it "
        f"faster, or raise rewards[i].timeout_s"
    )


def _function_error(reward: RewardFunction, error: BaseException) -> UserError:
    if isinstance(error, UserError):  # from a built-in reward: its message is complete
        return UserError(f"reward {reward.name!r}: {error}")
    return UserError(f"reward {reward.name!r} raised {describe_error(error)} (at {error_location(error)})")


def _at(line: str | None) -> str:
    return f" (at {line})" if line else ""


def _show_in_stacks(caller: Any, reward: RewardFunction) -> None:
    """Name the reward in faulthandler's stacks, the only trace of a process that faulthandler ends."""
    caller.__code__ = caller.__code__.replace(co_name=f"reward {reward.name!r}")


def _line_of_thread(thread: threading.Thread) -> str | None:
    frame = sys._current_frames().get(thread.ident or -1)
    return None if frame is None else user_line(traceback.extract_stack(frame))


def _line_of_coroutine(coroutine: Any) -> str | None:
    """Return the current line of a suspended coroutine; a task's own stack only has the outermost frame."""
    frames: list[traceback.FrameSummary] = []
    while getattr(coroutine, "cr_frame", None) is not None:
        frames += traceback.extract_stack(coroutine.cr_frame, limit=1)
        coroutine = coroutine.cr_await
    return user_line(frames)


@contextlib.contextmanager
def _interpreter_watchdog(limit_s: float) -> Iterator[None]:
    """End the process with all threads' tracebacks if the interpreter itself blocks for `limit_s`.

    A catastrophically backtracking regular expression, or an extension that holds the GIL, stops every thread,
    including the one watching the deadline. Only a timer outside the interpreter can end that.
    """
    if sys.__stderr__ is None:
        yield
        return
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
