"""Run one confined process: bounded output, a wall clock, total memory; all of it is killed at the end."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cohort.sandbox.limits import Limits
from cohort.sandbox.usage import Usage, descendants, usage

USAGE_CHECK_S = 0.1
_READ_BYTES = 1 << 16
_ERROR_BYTES = 4096

Ending = Literal["exited", "wall time", "output limit", "memory", "disk"]


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

    def usage(self, limits: Limits) -> Usage:
        """Return what the process and its descendants hold. Its first line of output must be there."""
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

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        # plain descriptors: run_process closes them
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (os.dup(pipe.fileno()) for pipe in pipes if pipe is not None)
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        self.ended = os.pidfd_open(self._process.pid)

    def usage(self, limits: Limits) -> Usage:
        """See `Child`."""
        return usage(descendants(self._process.pid), limits, ours=self._process.pid)

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
    pump = _Pump(child, request if isinstance(request, bytes) else b"", limits)
    try:
        if isinstance(request, bytes):
            ending = pump.run(start + limits.wall_s)
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

    def __init__(self, child: Child, request: bytes, limits: Limits) -> None:
        self._child, self._request, self._limits = child, memoryview(request), limits
        self.output, self.errors = bytearray(), bytearray()

    def run(self, deadline: float) -> Ending:
        """Pump until the process ends, and say why the pumping ended."""
        child = self._child
        next_check = time.monotonic() + USAGE_CHECK_S
        max_bytes = self._limits.channel_bytes
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
                if len(self.output) >= max_bytes:
                    return "output limit"
                if child.ended in ready and not ready & {child.stdout, child.stderr}:
                    return "exited"
                now = time.monotonic()
                if now >= deadline:
                    return "wall time"
                if now >= next_check:
                    next_check = now + USAGE_CHECK_S
                    if self.output and (exceeded := child.usage(self._limits).exceeded(self._limits)):
                        return exceeded

    def _close_stdin(self) -> None:
        """Close it, and leave a descriptor in its place for `run_process` to close."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._child.stdin, inheritable=False)
        os.close(nowhere)

    def _move(self, fd: int) -> bool:
        """Move some bytes; return whether there may be more."""
        if fd != self._child.stdin:
            data = os.read(fd, _READ_BYTES)
            is_output = fd == self._child.stdout
            into, limit = (self.output, self._limits.channel_bytes) if is_output else (self.errors, _ERROR_BYTES)
            into += data[: limit - len(into)]
            return bool(data)
        try:
            self._request = self._request[os.write(fd, self._request[:_READ_BYTES]) :]
        except BrokenPipeError:  # it does not read its input
            return False
        return bool(self._request)


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
