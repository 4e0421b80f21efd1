"""Stop runs on signals: remember the signal until the run reaches a point where it can save.

A handler that raises does so between any two instructions: in a library's callback, which swallows the exception, or
halfway through a file. A run's handlers do not raise. The system writes a signal's number into a pipe as it arrives
(`signal.set_wakeup_fd`), even while the main thread is in a long library call, and a thread reads it from there. The
run calls `check` wherever it waits, and between the parts of a step.
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
from cohort.run.result import EXIT_STATUS_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LAUNCHER = "COHORT_LAUNCHER"  # environment variable of ranks: process id of `cohort train`
STOP_EXIT_CODES = frozenset(128 + number for number in SIGNALS)  # of processes that stopped cleanly on a signal

LAUNCHER_GRACE_S = 5  # after the grace period, which ranks enforce themselves, until the launcher kills them
# A signal to the process group may end a server or worker slightly before it is noticed here.
SAME_SIGNAL_S = 0.5
_TICK_S = 0.2
_OTHERS_LATER_S = 2.0  # deadline of other ranks after that of rank 0, which reports how the run ended
_KEY = "cohort/stop"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

Role = Literal["run", "rank", "launcher"]


class RunStopped(SystemExit):
    """A signal stopped the run cleanly. The exit code is 128 + the signal's number."""

    def __init__(self, number: int):
        """`number` is the signal's number."""
        super().__init__(128 + number)


_watch: "_SignalWatcher | None" = None
_is_dedicated = False
_kill_callbacks: list[Callable[[], None]] = []


def dedicate_process() -> None:
    """Declare that this process only serves the run: it may exit anywhere while there is nothing to save."""
    global _is_dedicated
    _is_dedicated = True
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        faulthandler.enable()  # print a traceback on segfaults


def requested(*, within_s: float = 0.0) -> signal.Signals | None:
    """Return the signal that asked the run to stop, or None.

    Args:
        within_s: how long to wait for it. Processes that end by the same signal may be noticed before it.
    """
    if _watch is None:
        return None
    if within_s and _watch.number is None:
        _watch.stop_requested.wait(within_s)
    return None if _watch.number is None else signal.Signals(_watch.number)


def check() -> None:
    """Raise if the run was asked to stop. Called where it can stop.

    Raises:
        StopRequested: a signal has arrived.
    """
    if (number := requested()) is not None:
        raise StopRequested(f"asked to end by {number.name}")


@contextmanager
def on_kill(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call `clean_up` if a signal ends the process immediately while inside."""
    _kill_callbacks.append(clean_up)
    try:
        yield
    finally:
        _kill_callbacks.remove(clean_up)


def wait_or_stop(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Wait for an event, up to a timeout; return whether it happened.

    Args:
        wait: waits for the event up to the given number of seconds; returns whether it happened.
        timeout_s: total timeout.

    Raises:
        StopRequested: the run was asked to stop meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    while not wait(max(0.0, min(_TICK_S, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= deadline:
            return False
    return True


def can_save(yes: bool = True) -> None:
    """Set whether the run has something to save. If not, a signal ends a dedicated process immediately."""
    if _watch is not None:
        _watch.can_save = yes


def share(store: Any, sibling_pids: Collection[int]) -> None:
    """Stop all ranks when one of them gets a signal.

    Args:
        store: the ranks' shared store.
        sibling_pids: process ids of the other ranks of the same launcher.
    """
    if _watch is not None:  # a separate connection, since the run blocks in the other one
        _watch.store, _watch.sibling_pids = store.clone() if hasattr(store, "clone") else store, sibling_pids


@contextmanager
def handle_signals(role: Role, *, grace_s: float, resume_hint: Callable[[], str]) -> Iterator[None]:
    """Let the signals in `SIGNALS` request a stop while inside.

    Ignored signals and those with other handlers are left alone. A second signal ends the process immediately; so does
    the end of `grace_s`. For ranks, the launcher counts signals.

    Args:
        role: of this process: "run", all of it; "rank", one of several; "launcher", which forwards signals to ranks.
        grace_s: time the run may take to stop cleanly.
        resume_hint: returns a message that says what the same command would resume from.
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
    watch = _SignalWatcher((reading, writing), before, role=role, grace_s=grace_s, resume_hint=resume_hint)
    for number in before:
        signal.signal(number, _do_nothing)
    if role == "rank" and EXIT_STATUS_FILE in os.environ and signal.SIGTERM in before:
        # a rank that hangs, even holding the GIL, dumps its stacks when it is terminated; stderr is a log file here
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
        os.close(writing)  # ends the thread
        thread.join()
        os.close(reading)


def die_with_launcher() -> None:
    """Kill this rank when its launcher exits. Call in the main thread.

    An orphaned rank would keep training without a console, and keep the run folder locked.
    """
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    if sys.platform == "linux":  # elsewhere the watcher polls
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it has already exited
        os._exit(128 + signal.SIGKILL)


class _SignalWatcher:
    """State of the thread that reads the signal pipe."""

    def __init__(
        self,
        pipe: tuple[int, int],
        handlers: Mapping[Any, Any],
        *,
        role: Role,
        grace_s: float,
        resume_hint: Callable[[], str],
    ):
        self.number: int | None = None  # first signal
        self.stop_requested = threading.Event()
        self.can_save = False
        self.store: Any = None  # shared by the ranks; None for a single process, or once it is lost
        self.sibling_pids: Collection[int] = ()
        self.pipe = pipe  # descriptors to read from and write to
        self.handlers = handlers  # previous handlers of the watched signals
        self._missed = False  # the signal came before the launcher installed its handlers, which forward signals
        self._role = role
        self._grace_s = grace_s
        self._resume_hint = resume_hint
        self._is_rank0 = os.environ.get("RANK", "0") == "0"
        self._parent = os.getppid()
        self._deadline = math.inf

    def run(self) -> None:
        """Read the pipe until it is closed."""
        while True:
            readable, _, _ = select.select([self.pipe[0]], [], [], _TICK_S)
            if readable:
                numbers = os.read(self.pipe[0], 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self.handlers:
                        self._on_signal(number)
            self._poll()

    def _on_signal(self, number: int) -> None:
        if self._role == "rank" and self._sibling_is_gone():
            # the launcher terminates the remaining ranks, and nothing can be saved without the missing one
            if EXIT_STATUS_FILE not in os.environ:  # else the handler has dumped it
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            os._exit(128 + number)
        if self.number is None:
            self._request_stop(number)
        elif self._missed:
            self._missed = False  # this is the one sent again by `_poll`
        elif self._role != "rank":  # a rank may get the same signal from the cluster and from its launcher
            self._end(f"stopped immediately by a second {signal.Signals(number).name}")

    def _request_stop(self, number: int) -> None:
        self.number = number
        self.stop_requested.set()
        if self._role == "launcher" and self.can_save:  # its ranks have a deadline
            self._missed = signal.getsignal(number) is _do_nothing
            return
        self._deadline = time.monotonic() + self._grace_s + (0 if self._is_rank0 else _OTHERS_LATER_S)
        decides = self._is_rank0 or self.store is None  # rank 0 knows whether there is something to save
        self._store_does("set", _KEY, str(number))
        if decides and not self.can_save and (_is_dedicated or self._role != "run"):
            self._end(f"stopped by {signal.Signals(number).name}, with nothing new to save")

    def _poll(self) -> None:
        """Check for events that do not arrive as signals of this process."""
        if self._role == "rank" and os.getppid() != self._parent:
            os._exit(128 + signal.SIGKILL)
        if self._missed and self.number is not None and signal.getsignal(self.number) is not _do_nothing:
            os.kill(os.getpid(), self.number)
        if self.number is None and self._store_does("check", [_KEY]):
            self._request_stop(int(self._store_does("get", _KEY) or signal.SIGTERM))
        if self.number is not None and not self._is_rank0 and self._sibling_is_gone():
            os._exit(128 + self.number)  # rank 0 has exited, or the launcher is terminating all ranks
        if time.monotonic() > self._deadline:
            if self._role == "rank":
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            self._end(f"stopped: saving did not finish within hardware.grace_s ({self._grace_s:g} s)")

    def _store_does(self, method: str, *arguments: Any) -> Any:
        """Call a method of the shared store; None if there is none or it is lost."""
        if self.store is None:
            return None
        try:
            return getattr(self.store, method)(*arguments)
        except RuntimeError:
            self.store = None  # the process that hosted it has exited
            return None

    def _sibling_is_gone(self) -> bool:
        """Whether another rank on this machine has exited."""
        for process in self.sibling_pids:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False

    def _end(self, how: str) -> None:
        """Exit the process immediately."""
        assert self.number is not None
        try:
            for clean_up in list(_kill_callbacks):
                clean_up()
            # bypass sys.stdout, which the main thread may hold, and do not block on a closed or paused console
            if self._is_rank0 and select.select([], [1], [], 1.0)[1]:
                shown = "\x1b[?25h" if os.isatty(1) else ""  # a progress bar hides the cursor
                os.write(1, f"{shown}\n{how}; {self._resume_hint()}\n".encode())
        finally:
            os._exit(128 + self.number)


_fork = threading.local()  # `mask`: the forking thread's signal mask


def _block_signals() -> None:
    """Hold back signals to a process that is being forked: until it forgets this one's pipe, it would write to it."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _watch is not None else None


def _unblock_signals() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget_in_child() -> None:
    """Restore default signal handling in forked processes, such as those of multiprocessing."""
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        faulthandler.unregister(signal.SIGTERM)
        for number, handler in _watch.handlers.items():
            signal.signal(number, handler)
        for end in _watch.pipe:  # the run waits at its end until nobody can write to it, and a child may live longer
            os.close(end)
        _watch = None
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forget_in_child)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler that does nothing: Python writes to the wakeup pipe only for signals with a handler."""
