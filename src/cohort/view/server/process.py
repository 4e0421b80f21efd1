"""The page beside a run: a process of its own at low priority, started by the run."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cohort.view.server.browser import describe_address
from cohort.view.server.serve import ViewServer, lower_priority

GRACE_S = 60.0  # after the run's process has ended and the last tab was closed
LONGEST_S = 6 * 3600.0  # after the run's process has ended, even if a tab is still open
_TICK_S = 2.0


def serve_beside(folder: Path, parent: int) -> None:
    """Serve the page of a run until it has ended and nobody looks any more. Print the address, then close stdout.

    Args:
        folder: the run's folder.
        parent: process id of the run, which started this process.
    """
    lower_priority()
    try:
        server = ViewServer([folder])
    except (OSError, ValueError) as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    server.stop_on_signals()
    print(describe_address(server.address, os.environ), flush=True)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # close the pipe
    threading.Thread(target=_stop_after_run, args=(server, parent), daemon=True).start()
    server.serve_until_stopped()


def _stop_after_run(server: ViewServer, parent: int, clock: Callable[[], float] = time.monotonic) -> None:
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
