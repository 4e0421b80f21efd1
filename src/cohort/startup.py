"""How long commands take to start and to end: most of it is for the many objects that torch and transformers make."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_paused = False


def pause_collection() -> None:
    """No garbage collection while libraries are imported, which makes that a quarter shorter: there is no garbage."""
    global _paused
    _paused = gc.isenabled()
    gc.disable()


def resume_collection() -> None:
    """To be called once all is imported, before anything is computed."""
    if _paused:
        gc.enable()


def loading() -> None:
    """Tell a person at a terminal why nothing happens for some seconds."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("loading PyTorch and transformers ...", file=sys.stderr, flush=True)


def run_and_leave(main: Callable[[], None]) -> None:
    """Run a command, and end the process without taking it apart object by object, which takes a second."""
    pause_collection()
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
