"""What tests of other processes need: to wait for them, and a port for them to listen on."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 900.0  # for what must come about, on however busy a machine; nothing here asserts that something is quick


def until(condition: Callable[[], Any], *, timeout_s: float = PATIENCE_S, every_s: float = 0.01) -> None:
    """Wait until it holds; a test that waits in vain fails."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about within {timeout_s:g} s"
        time.sleep(every_s)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and has not been waited for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def group_of(number: int) -> list[int]:
    """The running processes of a process group."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp, *_ = file.read_text().rpartition(")")[2].split()
            pids += [int(file.parent.name)] * (state != "Z" and int(pgrp) == number)
    return pids


def num_lines(file: Path) -> int:
    """Whole lines of a file that another process writes; 0 before it is there."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
