"""Cores and memory of this machine that this process may use."""

from pathlib import Path

import psutil


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity())
    return psutil.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory that is available on this machine, or in this process's control group (version 2) if that has less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        return max(1, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no such files, or "max"
        return available
