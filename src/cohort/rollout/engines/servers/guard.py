"""Runs a server, and ends it when whoever asked for it is gone, even by SIGKILL.

Run by path with the standard library alone, so that it starts at once: `python -I -S guard.py COMMAND...`. The first
line that it prints is the server's process id, which is also its process group's. It ends the whole group, the
engine's processes included, when the server ends, when its own standard input does, or when its parent has changed.
Its exit code is the server's, or 128 plus the signal that killed it.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_LOOKS_EVERY_S = 0.2


def main(command: list[str]) -> int:
    """Run `command` until it ends, or nobody wants it any more."""
    parent = os.getppid()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    print(server.pid, flush=True)
    try:
        while server.poll() is None and os.getppid() == parent:
            # a child of the parent may hold the other end of our input as well, hence both conditions
            readable, _, _ = select.select([sys.stdin], [], [], _LOOKS_EVERY_S)
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


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster's warning is for the run, which saves and ends servers
    sys.exit(main(sys.argv[1:]))
