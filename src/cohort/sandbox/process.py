"""Run one confined process: bounded output, a wall clock, total memory; all of it is killed at the end."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cohort.sandbox.limits import Limits

MEMORY_CHECK_S = 0.1
_READ_BYTES = 1 << 16
_ERROR_BYTES = 4096

Ending = Literal["exited", "wall time", "output limit", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """What one confined process left behind."""

    output: bytes  # standard output, at most the limit
    errors: bytes  # the beginning of standard error
    ending: Ending
    exit_code: int | None  # -signal if one killed it; None if it was killed for its `ending`
    wall_s: float


class Child(Protocol):
    """A started process."""

    stdin: int  # its standard input, to write to
    stdout: int
    stderr: int
    ended: int  # becomes readable when it has ended

    def resident_bytes(self) -> int:
        """Return the memory that the process and its descendants hold."""
        ...

    def pause(self) -> None:
        """Stop the process and its descendants until `resume`."""
        ...

    def resume(self) -> None:
        """Let them go on."""
        ...

    def end(self) -> int | None:
        """Kill it and all that it started, and return its exit code, `-signal`, or None if it is not known."""
        ...


class Conversation(Protocol):
    """What is said to a process that reads more than one request."""

    def converse(self, child: Child, deadline_s: float) -> Ending:
        """Talk to a process until it ends or is no longer needed, and say why the talking ended.

        Args:
            child: just started.
            deadline_s: most seconds for an answer.
        """
        ...


class PopenChild:
    """A child of this process in its own session. `command` must end all that it started when it is killed."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        # plain descriptors: run_process closes them
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (os.dup(pipe.fileno()) for pipe in pipes if pipe is not None)
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        self.ended = os.pidfd_open(self._process.pid)

    def resident_bytes(self) -> int:
        """See `Child`."""
        return held_bytes(descendants(self._process.pid))

    def pause(self) -> None:
        """See `Child`."""
        pause_all(lambda: descendants(self._process.pid))

    def resume(self) -> None:
        """See `Child`."""
        signal_all(descendants(self._process.pid), signal.SIGCONT)

    def end(self) -> int | None:
        """See `Child`."""
        signal_all(descendants(self._process.pid), signal.SIGKILL)  # not reaped yet, so the ids are still theirs
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def run_process(child: Child, request: bytes | Conversation, limits: Limits) -> ProcessResult:
    """Write `request` to a process, read its output within the limits, and end it.

    Args:
        child: just started.
        request: its standard input, or a conversation, which reads the output and applies the limits itself.
        limits: wall time, output and memory are limited here.
    """
    start = time.monotonic()
    pump = _Pump(child, request if isinstance(request, bytes) else b"", limits.channel_bytes)
    try:
        if isinstance(request, bytes):
            ending = pump.run(start + limits.wall_s, limits.memory_bytes)
        else:
            ending = request.converse(child, limits.wall_s)
    finally:
        exit_code = child.end()
        for fd in (child.stdin, child.stdout, child.stderr, child.ended):
            with contextlib.suppress(OSError):
                os.close(fd)
    return ProcessResult(
        output=bytes(pump.output),
        errors=bytes(pump.errors),
        ending=ending,
        exit_code=exit_code if ending == "exited" else None,
        wall_s=time.monotonic() - start,
    )


class _Pump:
    """Writes one pipe and reads two until the process ends."""

    def __init__(self, child: Child, request: bytes, max_output_bytes: int) -> None:
        self._child, self._request, self._limit = child, memoryview(request), max_output_bytes
        self.output, self.errors = bytearray(), bytearray()

    def run(self, deadline: float, max_memory_bytes: int) -> Ending:
        """Pump until the process ends, and say why the pumping ended."""
        child = self._child
        next_check = time.monotonic() + MEMORY_CHECK_S
        with selectors.DefaultSelector() as selector:
            for fd in (child.stdout, child.stderr, child.ended):
                selector.register(fd, selectors.EVENT_READ)
            os.set_blocking(child.stdin, False)
            selector.register(child.stdin, selectors.EVENT_WRITE)
            while True:
                wait_s = max(0.0, min(deadline, next_check) - time.monotonic())
                ready = {key.fd for key, _ in selector.select(wait_s)}
                for fd in ready - {child.ended}:
                    if not self._move(fd):
                        selector.unregister(fd)
                        if fd == child.stdin:
                            self._close_stdin()
                if len(self.output) >= self._limit:
                    return "output limit"
                if child.ended in ready and not ready & {child.stdout, child.stderr}:
                    return "exited"
                now = time.monotonic()
                if now >= deadline:
                    return "wall time"
                if now >= next_check:
                    next_check = now + MEMORY_CHECK_S
                    if child.resident_bytes() > max_memory_bytes:
                        return "memory"

    def _close_stdin(self) -> None:
        """Close it, and leave a descriptor in its place for `run_process` to close."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._child.stdin, inheritable=False)
        os.close(nowhere)

    def _move(self, fd: int) -> bool:
        """Move some bytes; return whether there may be more."""
        if fd != self._child.stdin:
            data = os.read(fd, _READ_BYTES)
            into, limit = (self.output, self._limit) if fd == self._child.stdout else (self.errors, _ERROR_BYTES)
            into += data[: limit - len(into)]
            return bool(data)
        try:
            self._request = self._request[os.write(fd, self._request[:_READ_BYTES]) :]
        except BrokenPipeError:  # it does not read its input
            return False
        return bool(self._request)


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def pause_all(find: Callable[[], Sequence[int]]) -> None:
    """Stop processes, until `find` returns no new ones."""
    stopped: set[int] = set()
    while new := set(find()) - stopped:
        signal_all(new, signal.SIGSTOP)
        stopped |= new


def held_bytes(pids: Sequence[int]) -> int:
    """Return the memory that processes hold: anonymous, shared, and that of files without a name (`memfd_create`)."""
    files = {key: size for pid in pids for key, size in _memory_files(pid)}
    return sum(map(_resident_bytes, pids)) + sum(files.values())


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, without pages of files on disk; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the identity and the size of each open file in memory."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    status = os.stat(entry.path)
                    yield (status.st_dev, status.st_ino), 512 * status.st_blocks
