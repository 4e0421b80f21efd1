"""Faster start and exit of commands: no garbage collection during imports, no teardown at the end."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_paused = False


def pause_gc() -> None:
    """Disable garbage collection while libraries are imported: a quarter faster, and there is no garbage."""
    global _paused
    _paused = gc.isenabled()
    gc.disable()


def resume_gc() -> None:
    """Enable garbage collection again, after imports and before any computation."""
    if _paused:
        gc.enable()


def print_loading_notice() -> None:
    """Say on a terminal what takes the next few seconds."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("loading PyTorch and transformers ...", file=sys.stderr, flush=True)


def run_and_exit(main: Callable[[], None]) -> None:
    """Run a command and exit without interpreter teardown, which takes a second."""
    pause_gc()
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    if not (code is None or isinstance(code, int)):
        sys.exit(str(code))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code or 0)
