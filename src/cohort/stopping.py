"""How a run is asked to end: by signals, which are remembered until it comes to where it can save.

A handler that raises does so between any two instructions: in a callback of a library, which drops the exception, or
halfway through a file. Those of a run do not raise. The system writes a signal's number into a pipe as it arrives
(`signal.set_wakeup_fd`), even while the main thread is in a long call of a library, and a thread reads it there. The
run asks (`check`) wherever it waits, and between the parts of a step.
"""

import ctypes
import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from cohort.errors import StopRequested
from cohort.outcome import OUTCOME_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LAUNCHER = "COHORT_LAUNCHER"  # environment variable of ranks: the process id of `cohort train`
CODES = frozenset(128 + number for number in SIGNALS)  # exit codes of processes that a signal has ended in good order

LATER_S = 5  # than the end of the grace, which ranks keep themselves, a launcher kills them
# Between the end of a server or a worker and the news of the signal that has ended it and asked the run to end.
SAME_SIGNAL_S = 0.5
_TICK_S = 0.2
_OTHERS_LATER_S = 2.0  # after rank 0, which tells what has become of the run
_KEY = "cohort/stop"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

Role = Literal["run", "rank", "launcher"]


class RunStopped(SystemExit):
    """A signal has ended the run in good order. The exit code is 128 + the signal's number."""

    def __init__(self, number: int):
        """`number` is the signal's."""
        super().__init__(128 + number)


_watch: "_Watch | None" = None
_process_is_ours = False
_clean_up: list[Callable[[], None]] = []


def own_process() -> None:
    """This process is there for the run alone: it may be ended wherever it is while there is nothing to save."""
    global _process_is_ours
    _process_is_ours = True
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        faulthandler.enable()  # whoever segfaults shows where


def requested(*, within_s: float = 0.0) -> signal.Signals | None:
    """The signal that has asked the run to end; None while none has.

    Args:
        within_s: how long to wait for it. What ends with this process by the same signal may be noticed earlier.
    """
    if _watch is None:
        return None
    if within_s and _watch.number is None:
        _watch.asked.wait(within_s)
    return None if _watch.number is None else signal.Signals(_watch.number)


def check() -> None:
    """To be called where the run can end.

    Raises:
        StopRequested: it was asked to.
    """
    if (number := requested()) is not None:
        raise StopRequested(f"asked to end by {number.name}")


@contextmanager
def cleaning_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Inside, this is called where a signal ends the process at once."""
    _clean_up.append(clean_up)
    try:
        yield
    finally:
        _clean_up.remove(clean_up)


def patiently(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Whether something came within a time.

    Args:
        wait: waits for it, so many seconds at most; whether it came.
        timeout_s: for all of it.

    Raises:
        StopRequested: the run was asked to end meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    while not wait(max(0.0, min(_TICK_S, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= deadline:
            return False
    return True


def can_save(yes: bool = True) -> None:
    """Whether the run has something to save; before that, a signal ends a process of ours wherever it is."""
    if _watch is not None:
        _watch.can_save = yes


def share(store: Any, neighbours: Collection[int]) -> None:
    """From here on, a signal to one rank is a signal to all.

    Args:
        store: that the ranks have in common.
        neighbours: process ids of the others that the same launcher has started.
    """
    if _watch is not None:  # a connection of its own: the run waits in the other one
        _watch.store, _watch.neighbours = store.clone() if hasattr(store, "clone") else store, neighbours


@contextmanager
def watching(role: Role, *, grace_s: float, goes_on_from: Callable[[], str]) -> Iterator[None]:
    """Inside, the signals of `SIGNALS` ask the run to end. One that is ignored, or has another handler, stays so.

    A second one ends the process at once; so does the end of `grace_s`. Of ranks it is the launcher that counts.

    Args:
        role: of this process: "run", all of it; "rank", one of several; "launcher", which hands signals on to ranks.
        grace_s: how long the run may take to end in good order.
        goes_on_from: says in words what the same command would go on from.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) in defaults}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watch = _Watch(reading, before, role=role, grace_s=grace_s, goes_on_from=goes_on_from)
    for number in before:
        signal.signal(number, _do_nothing)
    if role == "rank" and OUTCOME_FILE in os.environ and signal.SIGTERM in before:
        # whoever hangs, the interpreter's lock held or not, shows where when it is told to end; stderr is a log here
        faulthandler.register(signal.SIGTERM, chain=True)
    thread = threading.Thread(target=watch.run, name="signals", daemon=True)
    thread.start()
    _watch = watch
    try:
        yield
    finally:
        _watch = None
        signal.set_wakeup_fd(fd_before)
        if role == "rank":
            faulthandler.unregister(signal.SIGTERM)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # which ends the thread
        thread.join()
        os.close(reading)


def die_with_launcher() -> None:
    """End this rank, as by SIGKILL, when the process that has started it ends. To be called in the main thread.

    A rank that its launcher leaves behind would train on without a console, and keep the run folder.
    """
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    if sys.platform == "linux":  # elsewhere the watch looks from time to time
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it has ended before that
        os._exit(128 + signal.SIGKILL)


class _Watch:
    """What the thread knows that reads the pipe."""

    def __init__(
        self, pipe: int, handlers: Mapping[Any, Any], *, role: Role, grace_s: float, goes_on_from: Callable[[], str]
    ):
        self.number: int | None = None  # of the signal that came first
        self.asked = threading.Event()
        self.can_save = False
        self.store: Any = None  # of several ranks; None without, and when it has gone
        self.neighbours: Collection[int] = ()
        self._pipe = pipe
        self.handlers = handlers  # of the signals that it looks for, as they were before
        self._missed = False  # the launcher's own handlers, which hand signals on, were not there yet
        self._role = role
        self._grace_s = grace_s
        self._goes_on_from = goes_on_from
        self._speaks = os.environ.get("RANK", "0") == "0"
        self._parent = os.getppid()
        self._deadline = math.inf

    def run(self) -> None:
        """Read the pipe until it is closed."""
        while True:
            readable, _, _ = select.select([self._pipe], [], [], _TICK_S)
            if readable:
                numbers = os.read(self._pipe, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self.handlers:
                        self._arrived(number)
            self._look()

    def _arrived(self, number: int) -> None:
        if self._role == "rank" and self._neighbour_is_gone():
            # the launcher ends those that are left, and nothing can be saved without the one that is gone
            if OUTCOME_FILE not in os.environ:  # else the handler has done it
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            os._exit(128 + number)
        if self.number is None:
            self._ask(number)
        elif self._missed:
            self._missed = False  # it is the one that is sent again below
        elif self._role != "rank":  # a rank may get one from a cluster and the same from its launcher
            self._end(f"ended at once by a second {signal.Signals(number).name}")

    def _ask(self, number: int) -> None:
        self.number = number
        self.asked.set()
        if self._role == "launcher" and self.can_save:  # its ranks have a deadline
            self._missed = signal.getsignal(number) is _do_nothing
            return
        self._deadline = time.monotonic() + self._grace_s + (0 if self._speaks else _OTHERS_LATER_S)
        decides = self._speaks or self.store is None  # rank 0 knows whether there is something to save
        self._store_does("set", _KEY, str(number))
        if decides and not self.can_save and (_process_is_ours or self._role != "run"):
            self._end(f"stopped by {signal.Signals(number).name}, with nothing new to save")

    def _look(self) -> None:
        """What no signal of this process tells."""
        if self._role == "rank" and os.getppid() != self._parent:
            os._exit(128 + signal.SIGKILL)
        if self._missed and self.number is not None and signal.getsignal(self.number) is not _do_nothing:
            os.kill(os.getpid(), self.number)
        if self.number is None and self._store_does("check", [_KEY]):
            self._ask(int(self._store_does("get", _KEY) or signal.SIGTERM))
        if self.number is not None and not self._speaks and self._neighbour_is_gone():
            os._exit(128 + self.number)  # rank 0 has ended, or the launcher ends all
        if time.monotonic() > self._deadline:
            if self._role == "rank":
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            self._end(f"stopped: it did not finish saving within hardware.grace_s ({self._grace_s:g} s)")

    def _store_does(self, method: str, *arguments: Any) -> Any:
        """The answer of the store that the ranks share."""
        if self.store is None:
            return None
        try:
            return getattr(self.store, method)(*arguments)
        except RuntimeError:
            self.store = None  # it went with the process that held it
            return None

    def _neighbour_is_gone(self) -> bool:
        """Whether another rank of this machine has ended."""
        for process in self.neighbours:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False

    def _end(self, how: str) -> None:
        """End this process wherever it is."""
        assert self.number is not None
        try:
            for clean_up in list(_clean_up):
                clean_up()
            # past sys.stdout, which the main thread may hold; and a console that is gone or paused is no reason to stay
            if self._speaks and select.select([], [1], [], 1.0)[1]:
                shown = "\x1b[?25h" if os.isatty(1) else ""  # a progress bar hides the cursor
                os.write(1, f"{shown}\n{how}; {self._goes_on_from()}\n".encode())
        finally:
            os._exit(128 + self.number)


def _forget_in_child() -> None:
    """A process that is forked, as multiprocessing does on Linux, has signals of its own: they are not the run's."""
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        faulthandler.unregister(signal.SIGTERM)
        for number, handler in _watch.handlers.items():
            signal.signal(number, handler)
        _watch = None


os.register_at_fork(after_in_child=_forget_in_child)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Python writes to the pipe for signals that have a handler."""
