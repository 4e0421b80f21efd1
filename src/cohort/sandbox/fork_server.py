"""Start processes under sandlock from a small process: forking it is cheap, and no thread of the run is in it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.sandbox.process import Child, descendants, signal_all

_MAX_REPLY_BYTES = 32
_END_S = 10.0
_SCRIPT = Path(__file__).parent / "sandlock_launcher.py"


class ForkServer:
    """The client of `sandlock_launcher`, which starts with the first order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, order: Mapping[str, Any]) -> "ForkedChild":
        """Start a confined process.

        Raises:
            OSError: the fork server does not start, or died.
        """
        pipes = [os.pipe() for _ in range(5)]
        (in_read, stdin), (stdout, out_write), (stderr, err_write), (ended, end_write), (life, lifeline) = pipes
        theirs, ours = [in_read, out_write, err_write, end_write, life], [stdin, stdout, stderr, ended, lifeline]
        try:
            with self._lock:
                channel = self._running()
                socket.send_fds(channel, [json.dumps(order).encode()], theirs)
                supervisor = channel.recv(_MAX_REPLY_BYTES)
        except OSError:
            _close(ours)
            raise
        finally:
            _close(theirs)
        return ForkedChild(int(supervisor or 0), *ours)

    def _running(self) -> socket.socket:
        if self._process is None or self._process.poll() is not None or self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            paths = [os.environ.get("PYTHONPATH"), *sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # Nothing else of the run's for code to find. Importing sandlock needs a home folder, and a user
                # without an entry in the password file has none.
                env={"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOME": "/"},
            )
            theirs.close()
            self._socket = ours
            weakref.finalize(self, _end, self._process, ours)
        return self._socket


class ForkedChild(Child):
    """A process that the fork server has started. `pid` is its supervisor, which runs no judged code."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int, ended: int, lifeline: int) -> None:
        self.pid, self.stdin, self.stdout, self.stderr, self.ended = pid, stdin, stdout, stderr, ended
        self._lifeline = lifeline  # its supervisor kills everything when this closes

    def watched(self) -> list[int]:
        """See `Child`."""
        return descendants(self.pid)[1:]

    def end(self) -> int | None:
        """See `Child`."""
        os.close(self._lifeline)
        if not select.select([self.ended], [], [], _END_S)[0]:  # the supervisor hangs
            signal_all(descendants(self.pid), signal.SIGKILL)
        status = b""
        while data := os.read(self.ended, 64):
            status += data
        return int(status) if status else None


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
        return
    process.kill()
    process.wait()
