"""Child processes that answer calls within a deadline, and end with this process: both ends.

A child has a process group of its own, which a guard kills when the child or this process ends (`guard.py`). Messages
to a child are pickles. Its answers are JSON: no answer can make this process run code.
"""

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import IO, Any

from cohort.processes import child_start, guard

# -P: the working directory must not hide a module of the standard library.
PYTHON = (sys.executable, "-P", "-u", "-X", "faulthandler")
MAX_ANSWER_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 5.0  # for a child to close what it holds
_END_TIMEOUT_S = 1.0  # between the end of a child's connection and that of the child
_MAX_LOG_BYTES = 16 << 20
_MAX_LIMIT_S = 1e9
_TAIL_BYTES = 4096  # of the output in messages


def start_in_group(
    command: Sequence[str],
    *,
    output: IO[bytes] | int,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    grace_s: float = 0.0,
) -> "subprocess.Popen[bytes]":
    """Start a command in a process group of its own, which is killed when the command or this process ends.

    Args:
        command: its command line.
        output: file for its standard output and standard error.
        env: its environment; None for this process's.
        pass_fds: descriptors that it inherits.
        grace_s: seconds between SIGTERM and SIGKILL when this process ends first.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(grace_s), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is for this process
    )


def end_group(process: "subprocess.Popen[bytes]", *, grace_s: float = 0.0) -> None:
    """Kill what `start_in_group` started: at once, or `grace_s` seconds after a SIGTERM."""
    if process.returncode is None:  # else its id may be another's, and its guard has killed the group
        with suppress(ProcessLookupError, PermissionError):
            if grace_s and process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_TIMEOUT_S)


def child_command(module: str) -> tuple[str, ...]:
    """Return the command line of a `Child` that runs `main` of a module."""
    return (*PYTHON, child_start.__file__, module)


class ChildFailed(Exception):  # noqa: N818
    """A child ended, or sent something else than an answer. Its text says so after a name for the child."""


class ChildLate(ChildFailed):
    """A child did not answer within the deadline."""


class Peer:
    """A connection over which this process exchanges messages with another one."""

    def __init__(self, connected: socket.socket) -> None:
        """Take a connected socket."""
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))  # of the same socket, and so with its deadlines
        self._sending = threading.Lock()

    def authenticate(self, key: bytes, timeout_s: float, *, asks_first: bool) -> None:
        """Authenticate both ends of a TCP connection by a shared key.

        Args:
            key: which both know.
            timeout_s: for each message of the other end.
            asks_first: which one of them does.

        Raises:
            AuthenticationError, EOFError, OSError, ValueError: the other end does not know it.
        """
        self._socket.settimeout(None)  # it may have had one to connect; `limit` has its own
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit(timeout_s)
        for meet in (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge):
            meet(self._connection, key)
        self.limit(0)

    def limit(self, seconds: float) -> None:
        """Let each read and write of the connection take so long; 0: forever. Then they raise `BlockingIOError`."""
        microseconds = int(1_000_000 * min(seconds, _MAX_LIMIT_S)) or int(seconds > 0)
        limit = struct.pack("@ll", *divmod(microseconds, 1_000_000))  # a `timeval`
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Any) -> None:
        """Send a message. Raises `ChildFailed` if the connection has ended."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, content: bytes) -> None:
        """Send the bytes of a message. Raises `ChildFailed` if the connection has ended."""
        try:
            with self._sending:
                self._connection.send_bytes(content)
        except BlockingIOError:
            raise
        except OSError:
            raise self._failure("closed its connection") from None

    def receive(self, read: Callable[[bytes], Any] = json.loads, *, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        """Wait for a message and return it. Raises `ChildFailed` if the connection has ended, or it is none.

        Args:
            read: reads the bytes of a message, without running any of its code; raises `ValueError` if it cannot.
            max_bytes: of a message.
        """
        try:
            return read(self._connection.recv_bytes(max_bytes))
        except EOFError:
            raise self._failure("closed its connection") from None
        except BlockingIOError:
            raise
        except (OSError, ValueError) as error:  # it is too long, cut off or not JSON
            raise self._failure(f"sent an invalid message: {error!r:.200}") from None

    def describe_output(self) -> str:
        """Return "": the output of another process is not known."""
        return ""

    def hang_up(self) -> None:
        """Announce that no more messages follow, so that the other process can exit."""
        self._shut_down(socket.SHUT_WR)

    def kill(self) -> None:
        """End the connection."""
        self._shut_down(socket.SHUT_RDWR)

    def _shut_down(self, how: int) -> None:
        with suppress(OSError):
            self._socket.shutdown(how)

    def _failure(self, problem: str) -> ChildFailed:
        return ChildFailed(problem)


class Child(Peer):
    """A child process that answers calls. Whatever goes wrong kills its group."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Start a process.

        Args:
            command: its command line, to which the number of the descriptor for `connect` is appended.
            env: its environment; None for this process's.
        """
        # in append mode, so that it can be truncated while the child writes
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (lives as long as the child)
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            command = [*command, str(theirs.fileno())]
            self.process = start_in_group(command, output=self._log, env=env, pass_fds=(theirs.fileno(),))
        weakref.finalize(self, _kill_as, os.getpid(), self.process, self._connection, self._socket)

    def call(self, message: Any, deadline_s: float) -> Any:
        """Send a message and return the answer.

        Raises:
            ChildLate: the answer did not begin within the deadline, or stopped for as long in the middle.
            ChildFailed: the process ended, or the answer is invalid.
        """
        return next(self.call_each([message], [deadline_s]))

    def call_each(self, messages: Sequence[Any], deadlines_s: Iterable[float]) -> Iterator[Any]:
        """Send messages together, and yield the answers as they come. Raises as `call` does.

        Args:
            messages: at least one.
            deadlines_s: seconds that each answer may take, read when it is waited for. If they end before the answers,
                the process is killed.
        """
        limit_s, num_waited = 0.0, 0
        try:
            for num_waited, limit_s in zip(range(1, len(messages) + 1), deadlines_s, strict=False):
                self.limit(limit_s)
                if num_waited == 1:
                    self.send(list(messages))
                yield self.receive()
        except BlockingIOError:
            self.kill()
            raise ChildLate(f"did not answer within {limit_s:g} s") from None
        finally:
            self.limit(0)
            if num_waited < len(messages):
                self.kill()

    def receive(self, read: Callable[[bytes], Any] = json.loads, *, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        """Wait for a message and return it, as `Peer.receive` does."""
        if os.fstat(self._log.fileno()).st_size > _MAX_LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)
        return super().receive(read, max_bytes=max_bytes)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the process and its group."""
        end_group(self.process)
        super().kill()  # should another process hold the other end

    def describe_output(self) -> str:
        """Return a sentence with the last lines of output, to append to a message; "" if there are none."""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        output = os.pread(descriptor, _TAIL_BYTES, start).decode(errors="replace").strip()
        return f". Its last output:\n{output}" if output else ""

    def _failure(self, problem: str) -> ChildFailed:
        """Kill the process, and return how it ended, or else the problem, with its last lines of output."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_END_TIMEOUT_S)
            problem = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.kill()
        return ChildFailed(f"{problem}{self.describe_output()}")


def _kill_as(pid: int, process: "subprocess.Popen[bytes]", connection: Connection, connected: socket.socket) -> None:
    """Kill a child that is forgotten, but not in a fork of the process that started it."""
    if os.getpid() == pid:
        end_group(process)
        connection.close()
        connected.close()


def connect() -> Connection:
    """Return a child's connection to its parent. No process that the child starts inherits it."""
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)
    return connection


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer a child's messages, which come in lists, until its parent hangs up."""
    connection = connect()
    with suppress(EOFError, OSError):
        while True:
            for message in connection.recv():
                connection.send_bytes(json.dumps(answer(message)).encode())
