"""What processes hold of the machine: memory and disk, also where neither shows in a process's size."""

import contextlib
import math
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from cohort.sandbox.limits import Limits
from cohort.sandbox.system_calls import MAX_SHARED_BYTES

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


def usage(pids: Iterable[int], limits: Limits, *, ours: int | None = None) -> Usage:
    """Return what processes hold. `ours` is one that runs no judged code."""
    total = Usage()
    for pid in pids:
        total.add(pid, limits, is_ours=pid == ours)
    return total


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
