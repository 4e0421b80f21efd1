"""This process: a faster start and exit of commands, and the cores and memory it may use."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_POOLS_TIMEOUT_S = 5.0  # for the processes of pools to end

_paused = False
_pausing = threading.Lock()
_num_pausing = 0
_resumes = False


def pause_gc() -> None:
    """Disable garbage collection while libraries are imported: a quarter faster, and there is no garbage."""
    global _paused
    _paused = gc.isenabled()
    gc.disable()


def resume_gc() -> None:
    """Enable garbage collection again, after imports and before any computation.

    It leaves out what exists by then: to traverse the 900,000 objects of libraries takes 0.4 s, and the records of a
    step of many completions cause several full collections.
    """
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection while many long-lived records are created.

    Otherwise each collection traverses all records so far, which takes up to a third of the time. Do not use this while
    a model computes: garbage may hold GPU memory. Reentrant, and safe to use from several threads.
    """
    global _num_pausing, _resumes
    with _pausing:
        if not _num_pausing:
            _resumes = gc.isenabled()
            gc.disable()
        _num_pausing += 1
    try:
        yield
    finally:
        with _pausing:
            _num_pausing -= 1
            if not _num_pausing and _resumes:
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
    _end_process_pools()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code or 0)


def _end_process_pools() -> None:
    """End the `ProcessPoolExecutor`s that user code has left open, as the interpreter's teardown does.

    Otherwise multiprocessing's exit function waits for their processes forever. Those that hang are killed.
    """
    if (pools := sys.modules.get("concurrent.futures.process")) is None:
        return
    ending = threading.Thread(target=pools._python_exit, daemon=True)
    ending.start()
    ending.join(_POOLS_TIMEOUT_S)
    if ending.is_alive():
        import multiprocessing

        for process in multiprocessing.active_children():
            process.kill()


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity())
    return psutil.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory that is available on this machine, or in this process's control group (version 2) if that has less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        return max(1, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no such files, or "max"
        return available
