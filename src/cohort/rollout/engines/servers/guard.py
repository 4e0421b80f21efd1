"""Run a server and stop it when its parent dies, even by SIGKILL.

Run by path and with the standard library only, so that it starts fast: `python -I -S guard.py COMMAND...`. The first
line of output is the server's process id, which is also its process group. The whole group is killed when the server
exits, when standard input is closed, or when the parent process changes. The exit code is the server's, or 128 plus
the signal that killed it.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_POLL_INTERVAL_S = 0.2


def main(command: list[str]) -> int:
    """Run `command` until it exits or its parent is gone."""
    parent = os.getppid()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        close_fds=False,  # it gets the files that the parent passed on to it
    )
    print(server.pid, flush=True)
    try:
        while server.poll() is None and os.getppid() == parent:
            # a child of the parent may also hold the other end of our input, so check both
            readable, _, _ = select.select([sys.stdin], [], [], _POLL_INTERVAL_S)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
        if server.poll() is None:
            _signal_group(server.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(GRACE_S)
    finally:
        _signal_group(server.pid, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _exit)
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster's warning is for the run, which stops its servers
    sys.exit(main(sys.argv[1:]))
