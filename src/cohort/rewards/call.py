"""Call reward functions under deadlines: a function that hangs is an error and never hangs the run.

Sync functions run one after another in the main thread of the process, where signals, contexts and connections of their
file work, with no event loop running. Async functions run concurrently in one event loop that lives as long as the
runner, so that clients which a function keeps between steps stay usable.
"""

import asyncio
import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

from cohort.config.user_code import error_location, user_line
from cohort.errors import StopRequested, UserError, describe_error, excerpt
from cohort.ranks.stopping import NEVER_STOPPED, StopSignals
from cohort.rewards.completion_text import completion_text
from cohort.rewards.function import RewardFunction


def describe_completion_read(frames: Sequence[FrameType], arguments: Mapping[str, Any]) -> str:
    """Return ", reading completion i of n, 'text'", or "" if no variable of a frame is a completion.

    Args:
        frames: the function's frames, outermost first.
        arguments: what it was called with; `completions` are texts or lists of messages.
    """
    completions = arguments.get("completions")
    if not isinstance(completions, list):
        return ""
    numbers = {key: i for i, completion in enumerate(completions) for key in _identities(completion)}
    for frame in reversed(frames):
        found = [numbers[id(value)] for value in list(frame.f_locals.values()) if id(value) in numbers]
        if found:  # of several, loops have the current one last
            text = excerpt(completion_text(completions[found[-1]]))
            return f", reading completion {found[-1] + 1} of {len(completions)}, {text}"
    return ""


def _identities(completion: Any) -> list[int]:
    """Return the ids of a completion, its messages and their contents. Python shares short texts with other code."""
    if isinstance(completion, str):
        return [id(completion)] if len(completion) > 1 else []
    contents = [message.get("content") for message in completion if isinstance(message, Mapping)]
    long = [content for content in contents if isinstance(content, str) and len(content) > 1]
    return [id(value) for value in (completion, *completion, *long)]


@dataclass(frozen=True, slots=True)
class NotANumber:
    """A value of a child process that is not a number: only its description."""

    kind: str


def as_list(returned: Any, count: int) -> Any:
    """Return an iterable as a list, which runs a generator's code; anything else, text and mappings unchanged.

    Args:
        returned: what a function returned: any iterable, or an array of shape (N,) or (N, 1).
        count: expected number of values; at most one more is read of an iterable that may be endless.
    """
    if isinstance(returned, str | bytes | Mapping | Set):
        return returned
    with suppress(Exception):  # arrays of NumPy or PyTorch; a user's class may raise anything
        if math.prod(returned.shape) == len(returned):
            return returned.reshape(-1).tolist()
    if isinstance(returned, list | tuple):
        return list(returned)
    try:
        values = iter(returned)
    except TypeError:
        return returned
    return list(islice(values, count + 1))


def as_number(value: Any) -> float | None:
    """Return a value as a float: NaN for None, infinity for an integer that is too large, None if it is no number."""
    if value is None:
        return math.nan
    if not isinstance(value, bool | int | float):
        with suppress(Exception):  # arrays with a single element
            value = value.item()
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # an array of several elements, or a user's class
        return None


def describe_value(value: Any) -> str:
    """Describe a value with its type."""
    return value.kind if isinstance(value, NotANumber) else f"{excerpt(value)} ({type(value).__name__})"


_TICK_S = 0.2  # between checks whether the run should stop
_RETRY_S = 0.5  # until a function that caught an interrupt gets another one
_INTERRUPT_GRACE_S = 10.0  # after a deadline, until a process whose function cannot be interrupted is ended
_LOOP_GRACE_S = 1.0  # after a deadline, before the event loop is considered blocked
_INTERPRETER_GRACE_S = 60.0  # after a deadline, until a process whose interpreter is blocked is ended
# `re` handles signals, although it keeps the interpreter. Functions themselves use SIGALRM.
_SIGNAL = signal.SIGVTALRM


class MissedDeadline(UserError):  # noqa: N818
    """A reward function did not finish within its deadline."""


def call_sync(reward: RewardFunction, arguments: Mapping[str, Any], *, stop: StopSignals = NEVER_STOPPED) -> Any:
    """Return `reward.function(**arguments)`, as a list if it is an iterable.

    Raises:
        UserError: the function raised, or called `signal.signal` outside of a main thread.
        MissedDeadline: it did not return within `reward.timeout_s`.
        StopRequested: the run was asked to stop; the function is interrupted.
    """
    process = os.getpid()
    in_main_thread = threading.current_thread() is threading.main_thread()
    with _interpreter_watchdog(reward.timeout_s + _INTERPRETER_GRACE_S):
        try:
            if in_main_thread:
                with _no_running_loop():
                    return _Call(reward, arguments, stop).run()
            with _noticed_signals([reward]):
                return _call_in_thread(reward, arguments, stop)
        finally:
            if os.getpid() != process:  # the function forked, and its child returned too
                os._exit(0)


class _Interrupted(BaseException):
    """Ends a reward function. Not an `Exception`, which functions catch."""


class _Call:
    """A call in the main thread, and the thread that interrupts it by a signal, whose handler raises."""

    def __init__(self, reward: RewardFunction, arguments: Mapping[str, Any], stop: StopSignals):
        self._reward = reward
        self._arguments = arguments
        self._stop = stop
        self._deadline = time.monotonic() + reward.timeout_s
        self._running = False  # whether the handler may raise
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reward deadline", daemon=True)

    def run(self) -> Any:
        """Call the function."""
        before = signal.signal(_SIGNAL, self._on_signal)
        try:
            self._thread.start()
            # for code that keeps the interpreter, so that no other thread can run: counts CPU time
            signal.setitimer(signal.ITIMER_VIRTUAL, self._reward.timeout_s, 1.0)
            return self._call()
        except _Interrupted as interrupted:
            self._stop.check()
            raise deadline_error(self._reward, self._arguments, _frames(interrupted)) from None
        except StopRequested:
            raise
        except BaseException as error:  # SystemExit too
            raise function_error(self._reward, error, self._arguments)  # noqa: B904  (it has its cause)
        finally:
            self._running = False
            self._done.set()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            self._thread.join()
            signal.signal(_SIGNAL, signal.SIG_DFL if before is None else before)

    def _call(self) -> Any:
        self._running = True
        function, arguments = self._reward.function, self._arguments

        def call() -> Any:
            return as_list(function(**arguments), _num_completions(arguments))

        _show_in_stacks(call, self._reward)
        result = call()
        self._running = False
        return result

    def _is_due(self) -> bool:
        return self._stop.number is not None or time.monotonic() >= self._deadline

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        # not between the function's end and the line that notes it
        if self._running and self._is_due() and (frame is None or frame.f_code is not _Call._call.__code__):
            raise _Interrupted

    def _watch(self) -> None:
        """Interrupt the main thread at the deadline or when the run should stop."""
        main = threading.main_thread()
        while not self._done.wait(max(0.0, min(_TICK_S, self._deadline - time.monotonic()))):
            if self._is_due():
                signal.pthread_kill(main.ident or 0, _SIGNAL)
                if self._done.wait(_RETRY_S):
                    return
            if time.monotonic() > self._deadline + _INTERRUPT_GRACE_S:
                frames = _frames_of_thread(main)
                error = deadline_error(self._reward, self._arguments, frames)
                print(f"error: {error}. It cannot be interrupted, so the process ends", file=sys.stderr, flush=True)
                os._exit(1)


def _call_in_thread(reward: RewardFunction, arguments: Mapping[str, Any], stop: StopSignals) -> Any:
    """Call a function where this is not the main thread: in a thread that is abandoned if it hangs."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(as_list(reward.function(**arguments), _num_completions(arguments)))
        except BaseException as error:  # SystemExit too: the thread would swallow it
            future.set_exception(error)

    _show_in_stacks(work, reward)
    thread = threading.Thread(target=work, name=f"reward {reward.name}", daemon=True)
    thread.start()
    finished = stop.wait(lambda s: bool(wait([future], s).done), reward.timeout_s)
    if not finished:
        raise deadline_error(reward, arguments, _frames_of_thread(thread))
    if error := future.exception():
        raise function_error(reward, error, arguments)
    return future.result()


class AsyncCaller:
    """An event loop in a daemon thread, started at the first call and stopped with this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call_all(
        self, calls: Sequence[tuple[RewardFunction, Mapping[str, Any]]], *, stop: StopSignals = NEVER_STOPPED
    ) -> list[Any]:
        """Run async functions concurrently and return their results, as lists if they are iterables.

        Raises:
            UserError: a function raised, missed its `timeout_s`, blocked the loop, or called `signal.signal`.
            StopRequested: the run was asked to stop.
        """
        loop, thread = self._running_loop()
        longest_s = max(reward.timeout_s for reward, _ in calls)
        with (
            _noticed_signals([reward for reward, _ in calls]),
            _interpreter_watchdog(longest_s + _INTERPRETER_GRACE_S),
        ):
            future = asyncio.run_coroutine_threadsafe(_run_together(calls), loop)
            try:
                finished = stop.wait(lambda s: bool(wait([future], s).done), longest_s + _LOOP_GRACE_S)
            except StopRequested:
                future.cancel()
                raise
            if not finished:
                # Every task has its own deadline, so one of them must be blocking the loop.
                names = ", ".join(repr(reward.name) for reward, _ in calls)
                raise UserError(
                    f"async reward {names} did not finish within the deadline of {longest_s:g} s "
                    f"(rewards[i].timeout_s), because the event loop is blocked{_at(_frames_of_thread(thread))}; await "
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
            return as_list(await reward.function(**arguments), _num_completions(arguments))
        except BaseException as error:  # SystemExit would end the loop
            return function_error(reward, error, arguments)

    _show_in_stacks(guarded, reward)
    task = asyncio.create_task(guarded())
    # Not asyncio.wait_for: its TimeoutError looks like one raised by the function, and it waits for tasks that ignore
    # cancellation.
    done, _ = await asyncio.wait({task}, timeout=reward.timeout_s)
    if done:
        return task.result()
    frames = _frames_of_coroutine(task.get_coro())
    task.cancel()
    return deadline_error(reward, arguments, frames)


def deadline_error(reward: RewardFunction, arguments: Mapping[str, Any], frames: Sequence[FrameType]) -> MissedDeadline:
    """Return the error of a function that hangs, with its line and the completion that it is reading.

    Args:
        reward: the function.
        arguments: what it was called with.
        frames: its frames, outermost first.
    """
    return MissedDeadline(
        f"reward {reward.name!r} did not finish within its deadline of {reward.timeout_s:g} s{_at(frames)}"
        f"{describe_completion_read(frames, arguments)}; make it faster, or raise rewards[i].timeout_s"
    )


def function_error(reward: RewardFunction, error: BaseException, arguments: Mapping[str, Any]) -> UserError:
    """Return the error of a function that raised: its line, the completion that it was reading, and likely causes."""
    if isinstance(error, UserError):  # from a built-in reward: its message is complete
        wrapped = UserError(f"reward {reward.name!r}: {error}")
        wrapped.__cause__ = error.__cause__
        return wrapped
    wrapped = UserError(
        f"reward {reward.name!r} raised {describe_error(error)} (at {error_location(error)}"
        f"{describe_completion_read(_frames(error), arguments)}){_advice(error, arguments)}"
    )
    wrapped.__cause__ = error
    return wrapped


def _advice(error: BaseException, arguments: Mapping[str, Any]) -> str:
    """Say what the forms of prompts and signals mean for a function, if its error looks like a mistake about them."""
    text = describe_error(error)
    if isinstance(error, ValueError) and "main thread" in text:
        return (
            "; this reward runs outside of a main thread, where Python allows no signals: make it a plain `def` in a "
            "run in the main thread, or set isolate: true"
        )
    completion = next(iter(arguments.get("completions") or ()), None)
    if isinstance(completion, str) and isinstance(error, TypeError) and "string indices must be integers" in text:
        return "; the prompts are text, so completions are text too: use `completion`, not `completion[0]['content']`"
    if isinstance(completion, list) and isinstance(error, TypeError | AttributeError) and "list" in text:
        return (
            "; the prompts are chat messages, so a completion is a list of messages: its text is "
            "`completion[0]['content']`"
        )
    return ""


def _at(frames: Sequence[FrameType]) -> str:
    line = user_line([_summary(frame) for frame in frames])
    return f" (at {line})" if line else ""


def _summary(frame: FrameType) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False)


def _show_in_stacks(caller: Any, reward: RewardFunction) -> None:
    """Name the reward in faulthandler's stacks, the only trace of a process that faulthandler ends."""
    caller.__code__ = caller.__code__.replace(co_name=f"reward {reward.name!r}")


def _num_completions(arguments: Mapping[str, Any]) -> int:
    """Return the number of completions, or of the longest list if the function does not take them."""
    lists = [arguments["completions"]] if "completions" in arguments else list(arguments.values())
    return max((len(value) for value in lists if isinstance(value, list)), default=0)


def _frames(error: BaseException) -> list[FrameType]:
    """Return the frames of an exception's traceback, outermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _frames_of_thread(thread: threading.Thread) -> list[FrameType]:
    """Return the current frames of a thread, outermost first."""
    frame = sys._current_frames().get(thread.ident or -1)
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)][::-1]


def _frames_of_coroutine(coroutine: Any) -> list[FrameType]:
    """Return the frames of a suspended coroutine; a task's own stack only has the outermost one."""
    frames: list[FrameType] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames


@contextlib.contextmanager
def _no_running_loop() -> Iterator[None]:
    """Hide the event loop that runs in this thread, as in a notebook, and provide one that does not run.

    A function may use `asyncio.run`, or `asyncio.get_event_loop().run_until_complete`.
    """
    outer = asyncio._get_running_loop()
    task = asyncio.current_task(outer) if outer is not None else None
    if outer is not None and task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of `get_event_loop` where there is none
            try:
                current = asyncio.get_event_loop()
            except RuntimeError:
                current = None
        if current is None or current is outer or current.is_closed():
            asyncio.set_event_loop(asyncio.new_event_loop())
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None:
            asyncio.set_event_loop(outer)
            if task is not None:
                asyncio.tasks._enter_task(outer, task)


@contextlib.contextmanager
def _noticed_signals(rewards: Sequence[RewardFunction]) -> Iterator[None]:
    """Raise at the end if code outside of the main thread has used signals.

    Functions that grade answers set a signal for their time limit, and return 0 for whatever that raises.

    Raises:
        UserError: it has.
    """
    lines: list[str | None] = []

    def noticing(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                lines.append(user_line(traceback.extract_stack()[:-1]))
            return function(*arguments)

        return call

    places = [(signal._signal, "signal"), (signal, "alarm"), (signal, "setitimer")]  # type: ignore[attr-defined]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in before:
        setattr(place, name, noticing(function))
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)
    if lines:
        names = " or ".join(repr(reward.name) for reward in rewards)
        raise UserError(
            f"reward {names} uses signals (at {lines[0]}), which Python only allows in a main thread, and this one "
            f"does not run in one: make it a plain `def` in a run that is started in the main thread, or set "
            f"rewards[i].isolate: true"
        )


@contextlib.contextmanager
def _interpreter_watchdog(limit_s: float) -> Iterator[None]:
    """End the process with all threads' tracebacks if the interpreter itself blocks for `limit_s`.

    An extension that holds the GIL stops every thread, including the one watching the deadline. Only a timer outside
    the interpreter can end that.
    """
    if sys.__stderr__ is None:
        yield
        return
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
