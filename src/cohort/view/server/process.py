"""The page beside a run: a process of its own at low priority, started by the run."""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.startup import run_and_exit

if TYPE_CHECKING:
    from cohort.view.server.serve import ViewServer

START_TIMEOUT_S = 60.0
GRACE_S = 60.0  # after the run's process has ended and the last tab was closed
LONGEST_S = 6 * 3600.0  # after the run's process has ended, even if a tab is still open
_TICK_S = 2.0

_started: list[subprocess.Popen[bytes]] = []  # kept, as Python warns of processes that it forgets


class ViewStartError(OSError):
    """The page could not be started. The run goes on without it."""


def start_beside_run(run_dir: Path, *, timeout_s: float = START_TIMEOUT_S) -> str:
    """Start the page of a run, and return its address with the token.

    The page's process outlives this one while a tab is open, and for a minute after. It gets no signals from the
    terminal, so that Ctrl-C stops the run only, and holds neither of the run's outputs open. The token comes back
    through a pipe: other users see the arguments and environments of processes.

    Raises:
        ViewStartError: the page did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(run_dir.resolve()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    with process.stdout as output:
        line = _read_line(output.fileno(), timeout_s)
    if line.startswith("http://"):
        _started.append(process)
        return line
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    raise ViewStartError(f"the page did not start: {line or 'no answer'}; to see why: cohort view {run_dir}")


def _read_line(descriptor: int, timeout_s: float) -> str:
    """Read one line; what there is of it if the other end closes or time runs out."""
    deadline = time.monotonic() + timeout_s
    read = b""
    while not read.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            more = os.read(descriptor, 4096)
            if not more:
                break
            read += more
    return read.decode(errors="replace").strip()


def _stop_after_run(server: "ViewServer", parent: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Stop the server when the run's process has ended and nobody looks any more."""
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    ended = clock()
    while not server.should_exit:
        now = clock()
        nobody_looks = server.watcher.num_listeners == 0 and now - server.watcher.last_listened >= GRACE_S
        if now - ended >= LONGEST_S or (nobody_looks and now - ended >= GRACE_S):
            server.should_exit = True
        time.sleep(_TICK_S)


def main() -> None:
    """Serve the page of a run. Arguments: its folder, and the process id of the run."""
    from cohort.view.server.serve import ViewServer, lower_priority  # the run's process does not need them

    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    lower_priority()
    try:
        server = ViewServer([folder])
    except (OSError, ValueError) as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    server.stop_on_signals()
    print(server.address, flush=True)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # close the pipe
    threading.Thread(target=_stop_after_run, args=(server, parent), daemon=True).start()
    server.serve_until_stopped()


if __name__ == "__main__":
    run_and_exit(main)
