"""Ctrl-C ends a run even where a library drops the exception that it raises."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C raises KeyboardInterrupt where it arrives, and again at the next call of what this gives.

    Python raises it wherever it happens to be: in a callback or a destructor that an extension calls, it is printed and
    forgotten. A handler that somebody else has set stays; only the main thread may set one.
    """
    arrived = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        raise KeyboardInterrupt

    def raise_again() -> None:
        if arrived:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_again
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield raise_again
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
