"""Start the page beside a run, as a process of its own."""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 60.0

_started: list[subprocess.Popen[bytes]] = []  # kept, as Python warns of processes that it forgets


class PageStartError(OSError):
    """The page could not be started. The run goes on without it."""


def start_page(run_dir: Path, *, timeout_s: float = START_TIMEOUT_S) -> str:
    """Start `cohort view` for a run, and return what it prints: its address with the token, and how to reach it.

    The page's process outlives this one while a tab is open, and for a minute after. It gets no signals from the
    terminal, so that Ctrl-C stops the run only, and holds neither of the run's outputs open. The token comes back
    through a pipe: other users see the arguments and environments of processes.

    Raises:
        PageStartError: the page did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "cohort", "view", str(run_dir.resolve()), "--beside", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    with process.stdout as output:
        said = _read_until_closed(output.fileno(), timeout_s)
    if said.startswith("page: http://"):
        _started.append(process)
        return said
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    raise PageStartError(f"the page did not start: {said or 'no answer'}; to see why: cohort view {run_dir}")


def _read_until_closed(descriptor: int, timeout_s: float) -> str:
    """Read until the other end closes or time runs out."""
    deadline = time.monotonic() + timeout_s
    read = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([descriptor], [], [], left)[0]:
        more = os.read(descriptor, 4096)
        if not more:
            break
        read += more
    return read.decode(errors="replace").strip()
