"""Run a command whose process group is killed when the command, or the process that started it, ends.

Run by path and with the standard library only, so that it starts fast: `python -I -S guard.py PARENT GRACE_S COMMAND`,
in a session of its own. The command takes this process's place, so that process id and exit code are the command's.
The guard is a second process, which waits for the end of either: it works even if the parent is killed by SIGKILL, or
the command blocks its interpreter. If the parent ends first, the command has `GRACE_S` seconds after a SIGTERM.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

_POLL_INTERVAL_S = 0.1  # where the kernel reports no ends of processes
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(parent: int, grace_s: float, command: list[str]) -> None:
    """Start the guard, and become the command."""
    worker = os.getpid()
    if os.getppid() != parent:  # it has ended already
        sys.exit(128 + signal.SIGKILL)
    if os.fork() == 0:
        if os.fork() == 0:  # no child of the command, which may wait for all of its children
            _guard(parent, worker, grace_s)
        os._exit(0)
    os.wait()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster's warning is for the run, which ends its children
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _guard(parent: int, worker: int, grace_s: float) -> None:
    """Kill this process's group when one of the processes has ended. Never returns."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for descriptor in map(int, os.listdir("/dev/fd")):  # connections of the command end with it
        with suppress(OSError):
            os.close(descriptor)
    if _wait_for_end((parent, worker), None) == parent and grace_s:
        os.killpg(0, signal.SIGTERM)
        _wait_for_end((worker,), grace_s)
    os.killpg(0, signal.SIGKILL)


def _wait_for_end(pids: tuple[int, ...], timeout_s: float | None) -> int | None:
    """Wait until one of the processes has ended, and return which; None after the timeout."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ends = {}
    for pid in pids:
        try:
            ends[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            return pid
        except (AttributeError, OSError):  # macOS; a container that forbids it
            return _poll_for_end(pids, deadline)
    ready = select.select(list(ends), [], [], timeout_s)[0]
    return ends[ready[0]] if ready else None


def _poll_for_end(pids: tuple[int, ...], deadline: float | None) -> int | None:
    while deadline is None or time.monotonic() < deadline:
        for pid in pids:
            with suppress(PermissionError):
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    return pid
        time.sleep(_POLL_INTERVAL_S)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
