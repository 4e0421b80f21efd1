"""Stop runs on signals: remember the signal until the run reaches a point where it can save.

A handler that raises does so between any two instructions: in a library's callback, which swallows the exception, or
halfway through a file. Once there is something to save, handlers do not raise. The system writes a signal's number into
a pipe as it arrives (`signal.set_wakeup_fd`), even while the main thread is in a long library call, and a thread reads
it from there. The run calls `StopSignals.check` wherever it waits, and between the parts of a step.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
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

Role = Literal["run", "guest", "rank", "launcher"]


class RunStopped(SystemExit):
    """A signal stopped the run cleanly. The exit code is 128 + the signal's number."""

    def __init__(self, number: int):
        """`number` is the signal's number."""
        super().__init__(128 + number)


class StopSignals:
    """Whether a signal has asked the run to stop. Use as a context manager; outside of it, no stop is ever requested.

    Ignored signals and those with other handlers are left alone. A second signal ends the process immediately; so does
    the end of the grace period. In a guest it raises KeyboardInterrupt, and there is no such period. Ranks leave
    counting to their launcher, which forwards signals by handlers of its own.
    """

    number: signal.Signals | None  # the first signal
    can_save = False  # whether the run has something to save; if not, a signal ends it at once

    def __init__(self, role: Role = "run", *, grace_s: float = math.inf, resume_hint: Callable[[], str] = str):
        """Create an object that watches for signals once it is entered.

        Args:
            role: of this process: "run", all of it; "guest", in a program that has more to do and is never ended;
                "rank", one of several; "launcher" of ranks.
            grace_s: time the run may take to stop cleanly.
            resume_hint: returns a message that says what the same command would resume from.
        """
        self._role = role
        self._grace_s = grace_s
        self._resume_hint = resume_hint
        self._is_rank0 = os.environ.get("RANK", "0") == "0"
        self._parent = os.getppid()
        self._requested = threading.Event()
        self._reset()
        self._on_end: list[Callable[[], None]] = []
        self._store: Any = None  # shared by the ranks; None for a single process, or once it is lost
        self._sibling_pids: Collection[int] = ()
        self._handlers: dict[signal.Signals, Any] = {}  # previous ones of the watched signals
        self._thread: threading.Thread | None = None
        self._depth = 0  # how often the context was entered

    def __enter__(self) -> "StopSignals":
        """Start watching for signals. Does nothing outside the main thread, or inside another active context."""
        global _watching
        if _watching is not None or threading.current_thread() is not threading.main_thread():
            self._depth += 1
            return self
        if self._role != "rank":  # which acts in its next context on a signal that came after the last check
            self._reset()
        self._raises = False
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        self._handlers = {number: before for number in SIGNALS if (before := signal.getsignal(number)) in defaults}
        for number in self._handlers if self._role != "launcher" else ():  # first, as the handlers of before may raise
            signal.signal(number, self._on_interrupt)
        self._depth += 1
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if self._role == "rank" and EXIT_STATUS_FILE in os.environ and signal.SIGTERM in self._handlers:
            # a rank that hangs, even holding the GIL, dumps its stacks when it is terminated; stderr is a log file here
            faulthandler.register(signal.SIGTERM, chain=True)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        _watching = self
        self._raises = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the handlers. In a guest, a signal that came after the last check goes to the program's own handler.

        Raises:
            KeyboardInterrupt: that signal is SIGINT, and the program has Python's own handler.
        """
        global _watching
        self._depth -= 1
        if _watching is not self or self._thread is None or self._depth:
            return
        self._raises = False  # or the rest of this function may not run
        _watching = None
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._writing)  # ends the thread, which reads what has arrived before
        self._thread.join()
        self._thread = None
        os.close(self._reading)
        self._restore_handlers()
        if self._role == "guest" and error is None and self.number is not None:
            signal.raise_signal(self.number)

    def requested(self, *, within_s: float = 0.0) -> signal.Signals | None:
        """Return the signal that asked the run to stop, or None.

        Args:
            within_s: how long to wait for it. Processes that end by the same signal may be noticed before it.
        """
        if within_s and self.number is None and self._thread is not None:
            self._requested.wait(within_s)
        return self.number

    def check(self) -> None:
        """Raise if the run was asked to stop. Called where it can stop.

        Raises:
            StopRequested: a signal has arrived.
        """
        if self.number is not None:
            raise StopRequested(f"asked to end by {self.number.name}")

    def wait(self, wait: Callable[[float], bool], timeout_s: float) -> bool:
        """Wait for an event, up to a timeout; return whether it happened.

        Args:
            wait: waits for the event up to the given number of seconds; returns whether it happened.
            timeout_s: total timeout.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while not wait(max(0.0, min(_TICK_S, deadline - time.monotonic()))):
            self.check()
            if time.monotonic() >= deadline:
                return False
        return True

    @contextmanager
    def on_end(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Call `clean_up` if a signal ends the process immediately while inside."""
        self._on_end.append(clean_up)
        try:
            yield
        finally:
            self._on_end.remove(clean_up)

    def share(self, store: Any, sibling_pids: Collection[int]) -> None:
        """Stop all ranks when one of them gets a signal.

        Args:
            store: the ranks' shared store.
            sibling_pids: process ids of the other ranks of the same launcher.
        """
        if self._thread is not None:  # a separate connection, since the run blocks in the other one
            self._store, self._sibling_pids = store.clone() if hasattr(store, "clone") else store, sibling_pids

    def _reset(self) -> None:
        self.number = None
        self._requested.clear()
        self._deadline = math.inf
        self._num_handled = 0  # signals, in the main thread
        self._num_seen = 0  # in the watching thread
        self._raises = False  # whether handlers may raise

    def _on_interrupt(self, number: int, _frame: FrameType | None) -> None:
        """Raise in the main thread, as Python does on Ctrl-C, unless something is to be saved first."""
        if getattr(_fork, "mask", None) is not None:
            return  # Python drops what is raised around a fork; the next check raises
        self._num_handled += 1
        if not self._raises:
            self.number = self.number or signal.Signals(number)  # the thread may not run
            return
        if self._role in ("run", "guest") and self._num_handled == 1 and not self.can_save:
            self.number = signal.Signals(number)
            raise StopRequested(f"asked to end by {signal.Signals(number).name}")
        if self._role == "guest" and self._num_handled > 1:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Read the pipe until it is closed."""
        while True:
            readable, _, _ = select.select([self._reading], [], [], _TICK_S)
            if readable:
                numbers = os.read(self._reading, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._handlers:
                        self._on_signal(number)
            self._poll()

    def _on_signal(self, number: int) -> None:
        if self._role == "rank" and self._sibling_is_gone():
            # the launcher terminates the remaining ranks, and nothing can be saved without the missing one
            if EXIT_STATUS_FILE not in os.environ:  # else the handler has dumped it
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            os._exit(128 + number)
        self._num_seen += 1
        if self.number is None or (self._num_seen == 1 and self._role != "rank"):  # `_on_interrupt` may have been first
            self._request_stop(number)
        elif self._role in ("run", "launcher"):  # a rank may get the same signal from the cluster and from its launcher
            self._end(f"stopped immediately by a second {signal.Signals(number).name}")

    def _request_stop(self, number: int) -> None:
        self.number = signal.Signals(number)
        self._requested.set()
        if self._role in ("guest", "launcher"):  # whose ranks have a deadline
            return
        self._deadline = time.monotonic() + self._grace_s + (0 if self._is_rank0 else _OTHERS_LATER_S)
        decides = self._is_rank0 or self._store is None  # rank 0 knows whether there is something to save
        self._store_does("set", _KEY, str(number))
        if self._role == "rank" and decides and not self.can_save:
            if self._store is not None:
                time.sleep(2 * _TICK_S)  # until the other ranks have seen it: this process may hold the store
            self._end(f"stopped by {self.number.name}, with nothing new to save")

    def _poll(self) -> None:
        """Check for events that do not arrive as signals of this process."""
        if self._role == "rank" and os.getppid() != self._parent:
            os._exit(128 + signal.SIGKILL)
        if self.number is not None and not self._requested.is_set():  # it arrived before this thread ran
            self._request_stop(self.number)
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
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError:
            self._store = None  # the process that hosted it has exited
            return None

    def _sibling_is_gone(self) -> bool:
        """Whether another rank on this machine has exited."""
        for process in self._sibling_pids:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False

    def _end(self, how: str) -> None:
        """Exit the process immediately."""
        assert self.number is not None
        try:
            for clean_up in list(self._on_end):
                with suppress(Exception):
                    clean_up()
            # bypass sys.stdout, which the main thread may hold, and do not block on a closed or paused console
            if self._is_rank0 and select.select([], [1], [], 1.0)[1]:
                shown = "\x1b[?25h" if os.isatty(1) else ""  # a progress bar hides the cursor
                os.write(1, f"{shown}\n{how}; {self._resume_hint()}\n".encode())
        finally:
            os._exit(128 + self.number)

    def _restore_handlers(self) -> None:
        if self._role == "rank":
            faulthandler.unregister(signal.SIGTERM)
        for number, handler in reversed(self._handlers.items()):  # SIGINT last, as its handler may raise
            signal.signal(number, handler)

    def _forget_in_child(self) -> None:
        """Give a forked process the handlers of before."""
        signal.set_wakeup_fd(-1)
        self._restore_handlers()
        for end in (self._reading, self._writing):  # `_watch` ends when nobody can write, and a child may live longer
            os.close(end)


NEVER_STOPPED = StopSignals()


def die_with_launcher() -> None:
    """Kill this rank when its launcher exits. Call in the main thread.

    An orphaned rank would keep training without a console, and keep the run folder locked.
    """
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    if sys.platform == "linux":  # elsewhere `StopSignals` polls
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it has already exited
        os._exit(128 + signal.SIGKILL)


# A forked child inherits the pipe and would write its signals into its parent's. Signals are blocked during the fork,
# until the child has closed the pipe.
_watching: StopSignals | None = None
_fork = threading.local()  # `mask`: the forking thread's signal mask


def _before_fork() -> None:
    _fork.mask = None
    if _watching is not None:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # kept before anything is blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    if (mask := _fork.mask) is not None:
        _fork.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    global _watching
    if _watching is not None:
        _watching._forget_in_child()
        _watching = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
