"""Run one confined process: bounded output, a wall clock, total memory; all of it is killed at the end."""

import contextlib
import math
import os
import selectors
import signal
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Literal

from cohort.config.hardware import SandboxConfig
from cohort.config.section import parse_size
from cohort.sandbox.system_calls import MAX_SHARED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run."""

    wall_s: float
    cpu_s: int  # per process
    memory_bytes: int  # of all processes; for Python also the address space of each
    max_processes: int
    max_file_bytes: int
    tmp_bytes: int
    max_open_files: int
    max_output_bytes: int

    @property
    def channel_bytes(self) -> int:
        """Bytes that the guest may answer with: a character of JSON takes up to 6, and each record has a frame."""
        return 6 * self.max_output_bytes + 65_536

    @staticmethod
    def of(config: SandboxConfig) -> "Limits":
        """Return the limits of a configuration."""
        return Limits(
            wall_s=config.wall_s,
            cpu_s=config.cpu_s,
            memory_bytes=parse_size(config.memory),
            max_processes=config.max_processes,
            max_file_bytes=parse_size(config.max_file_size),
            tmp_bytes=parse_size(config.tmp_size),
            max_open_files=config.max_open_files,
            max_output_bytes=parse_size(config.max_output),
        )

    def rlimits(self, *, counts_processes: bool, limits_addresses: bool) -> dict[str, int]:
        """Return the resource limits that the guest sets for itself.

        Args:
            counts_processes: whether the user's processes outside of the sandbox do not count, so that RLIMIT_NPROC
                is a limit for the sandbox alone.
            limits_addresses: whether to limit the address space. Runtimes such as Go's and Java's reserve far more
                than they use.
        """
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.max_file_bytes,
            "RLIMIT_NOFILE": self.max_open_files,
        }
        if counts_processes:
            limits["RLIMIT_NPROC"] = self.max_processes
        if limits_addresses:
            limits["RLIMIT_AS"] = self.memory_bytes
        return limits


_DELETED = " (deleted)"
_IN_MEMORY = ("/memfd:", "/dev/zero")
_SOCKET_BYTES = 212_992  # where the kernel does not tell


@dataclass(slots=True)
class Usage:
    """Memory, and disk that no folder shows."""

    memory_bytes: float = 0.0
    _sockets: set[int] = field(default_factory=set)
    _files: dict[tuple[int, int], tuple[bool, float]] = field(default_factory=dict)  # identity -> in memory, bytes

    def exceeded(self, limits: Limits) -> Literal["memory", "disk"] | None:
        """Return a limit that is exceeded."""
        files = self._files.values()
        memory = self.memory_bytes + sum(size for in_memory, size in files if in_memory)
        if memory + len(self._sockets) * _most_in_a_socket() > limits.memory_bytes:
            return "memory"
        return "disk" if sum(size for in_memory, size in files if not in_memory) > limits.tmp_bytes else None

    def add(self, pid: int, limits: Limits, *, is_ours: bool) -> None:
        """Add what a process holds.

        Args:
            pid: process id; nothing is added if it has ended.
            limits: a file that only a mapping holds counts as the largest that there may be.
            is_ours: whether it runs no judged code, so that nothing is wrong if it cannot be looked into.
        """
        for task in _tasks(pid):  # the first may have ended, while others run on
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = Path(f"{task}/status").read_text().splitlines()
                sizes = [line.split() for line in status if line.startswith(("RssAnon:", "VmPTE:"))]
                if not sizes:
                    continue
                self.memory_bytes += sum(1024 * int(words[1]) for words in sizes)
                is_ours = is_ours or any(_is_first_of_namespace(line) for line in status)
                try:
                    self._add_open_files(task)
                    self._add_mappings(task, limits)
                except PermissionError:
                    self.memory_bytes += 0.0 if is_ours else math.inf  # it hides
                return

    def _add_open_files(self, task: str) -> None:
        """Add sockets, and files without a name."""
        with os.scandir(f"{task}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(entry.path)
                    if stat.S_ISSOCK(status.st_mode):
                        self._sockets.add(status.st_ino)
                    elif stat.S_ISREG(status.st_mode) and not status.st_nlink:
                        in_memory = os.readlink(entry.path).startswith(_IN_MEMORY)
                        self._files[status.st_dev, status.st_ino] = (in_memory, 512.0 * status.st_blocks)

    def _add_mappings(self, task: str, limits: Limits) -> None:
        """Add files without a name that are mapped and no longer open."""
        for line in Path(f"{task}/maps").read_text(errors="replace").splitlines():
            if line.endswith(_DELETED):
                addresses, _, _, device, inode, path = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                major, minor = (int(number, 16) for number in device.split(":"))
                most = MAX_SHARED_BYTES if path.startswith("/dev/zero") else limits.max_file_bytes
                file = os.makedev(major, minor), int(inode)
                self._files.setdefault(file, (path.startswith(_IN_MEMORY), max(most, end - start)))


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for task in _tasks(found[-1]):
            with contextlib.suppress(OSError):
                waiting += map(int, Path(f"{task}/children").read_text().split())
    return found


def _tasks(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task"))


def _is_first_of_namespace(line: str) -> bool:
    """Whether a line of a process's status says that it began a namespace of processes, as bubblewrap does."""
    name, *pids = line.split()
    return name == "NSpid:" and len(pids) > 1 and pids[-1] == "1"


@cache
def _most_in_a_socket() -> int:
    """Return the most bytes that wait in a socket: one message more than its buffer."""
    with contextlib.suppress(OSError):
        return 2 * int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 2 * _SOCKET_BYTES


_USAGE_CHECK_S = 0.1
_CHUNK_BYTES = 1 << 16
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


class Child(ABC):
    """A started process. Its standard input, output and error are ours to close."""

    pid: int  # of it, or of what supervises it
    stdin: int
    stdout: int
    stderr: int
    ended: int  # becomes readable when it has ended

    def watched(self) -> list[int]:
        """Return the processes whose memory and files count, and which `pause` stops."""
        return descendants(self.pid)

    def usage(self, limits: Limits) -> Usage:
        """Return what the process and its descendants hold. Its first line of output must be there."""
        total = Usage()
        for pid in self.watched():
            total.add(pid, limits, is_ours=pid == self.pid)
        return total

    def pause(self) -> None:
        """Stop the process and its descendants until `resume`."""
        stopped: set[int] = set()
        while new := set(self.watched()) - stopped:
            signal_all(new, signal.SIGSTOP)
            stopped |= new

    def resume(self) -> None:
        """Let them go on."""
        signal_all(self.watched(), signal.SIGCONT)

    @abstractmethod
    def end(self) -> int | None:
        """Kill it and all that it started, and return its exit code, `-signal`, or None if it is not known."""


class PopenChild(Child):
    """A child of this process in its own session. `command` must end all that it started when it is killed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=dict(env),
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.stdin, self.stdout, self.stderr = map(
            _detached, (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        self.ended = os.pidfd_open(self.pid)

    def end(self) -> int | None:
        """See `Child`."""
        signal_all(descendants(self.pid), signal.SIGKILL)  # not reaped yet, so the ids are still theirs
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


def _detached(pipe: IO[bytes] | None) -> int:
    """Close a pipe of `subprocess`, and return a descriptor of its own for it."""
    assert pipe is not None
    with pipe:
        return os.dup(pipe.fileno())


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Pump:
    """Writes to a process and reads what it says, within its limits."""

    def __init__(self, child: Child, limits: Limits) -> None:
        self.child, self._limits = child, limits
        self.output, self.errors = bytearray(), bytearray()
        self._is_ready = False  # whether the process has said anything
        self._next_check = time.monotonic() + _USAGE_CHECK_S
        self._open = {child.stdin, child.stdout, child.stderr, child.ended}
        self._selector = selectors.DefaultSelector()
        for fd in self._open - {child.stdin}:
            self._selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(child.stdin, False)

    def run(self, request: bytes, deadline: float, *, until: Callable[[], bool] | None = None) -> Ending | None:
        """Write a request, and read until a condition holds or the process must end.

        Args:
            request: what to write.
            deadline: time by `time.monotonic` at which the process must end.
            until: the condition, called at least every 0.1 s; None: read until the process ends, whose input ends
                after the request.

        Returns:
            Why the process must end; None if the condition holds.
        """
        left = memoryview(request)
        self._selector.register(self.child.stdin, selectors.EVENT_WRITE)
        while until is None or not until():
            wait_s = max(0.0, min(deadline, self._next_check) - time.monotonic())
            ready = {key.fd for key, _ in self._selector.select(wait_s)}
            if self.child.stdin in ready:
                left = self._write(left)
                if not left:
                    self._selector.unregister(self.child.stdin)
                    if until is None:
                        self._close(self.child.stdin)
            for fd in ready & {self.child.stdout, self.child.stderr}:
                self._read(fd)
            if len(self.output) >= self._limits.channel_bytes:
                return "output limit"
            if self.child.ended in ready and not ready & {self.child.stdout, self.child.stderr}:
                return "exited"
            if time.monotonic() >= deadline:
                return "wall time"
            if (exceeded := self._check_usage()) is not None:
                return exceeded
        if left:  # the process has answered before it was asked
            self._selector.unregister(self.child.stdin)
        return None

    def end(self) -> int | None:
        """End the process, and return its exit code, `-signal`, or None if it is not known."""
        try:
            return self.child.end()
        finally:
            self._selector.close()
            for fd in tuple(self._open):
                self._close(fd)

    def _write(self, data: memoryview) -> memoryview:
        """Write some bytes, and return what is left to write: nothing if the process does not read its input."""
        try:
            return data[os.write(self.child.stdin, data[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            return data[:0]

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK_BYTES)
        if not data:
            self._selector.unregister(fd)
        elif fd == self.child.stdout:
            self._is_ready = True
            self.output += data[: self._limits.channel_bytes - len(self.output)]
        else:
            self.errors += data[: _ERROR_BYTES - len(self.errors)]

    def _check_usage(self) -> Ending | None:
        """Return a limit that is exceeded; look only every 0.1 s, and not before the process has said anything."""
        now = time.monotonic()
        if now < self._next_check:
            return None
        self._next_check = now + _USAGE_CHECK_S
        return self.child.usage(self._limits).exceeded(self._limits) if self._is_ready else None

    def _close(self, fd: int) -> None:
        self._open.remove(fd)
        os.close(fd)


Conversation = Callable[[Pump], Ending]
"""Talks to a process that has just started until it ends or is no longer needed, and returns why the talking ended."""


def run_process(child: Child, request: bytes | Conversation, limits: Limits) -> ProcessResult:
    """Write `request` to a process, read its output within the limits, and end it.

    Args:
        child: just started.
        request: its standard input, or a conversation, which has its own deadlines.
        limits: wall time, output and memory are limited here.
    """
    start = time.monotonic()
    pump = Pump(child, limits)
    try:
        ending = pump.run(request, start + limits.wall_s) if isinstance(request, bytes) else request(pump)
        assert ending is not None, "a process that is not talked to is read until it ends"
    finally:
        exit_code = pump.end()
    return ProcessResult(
        output=bytes(pump.output),
        errors=bytes(pump.errors),
        ending=ending,
        exit_code=exit_code if ending == "exited" else None,
        wall_s=time.monotonic() - start,
    )
