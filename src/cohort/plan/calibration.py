"""What `cohort plan --calibrate` measured on this machine, kept in the user's cache for later plans.

One file, `cohort/calibration.json` in `$XDG_CACHE_HOME` or `~/.cache`, holds the latest measurement of each kind of
device on each machine. One that cannot be read, or has another version, counts as none.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cohort.errors import UserError

VERSION = 1  # of the file; whatever changes the meaning of a number changes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One device of a machine, measured. On a CPU all of its cores are one device."""

    device: str  # as the driver names it; of a CPU its model and cores
    on_gpu: bool
    machine: str  # host name
    date: str  # ISO 8601
    torch_version: str
    flops: Mapping[str, float]  # per second, of matrix products by dtype
    memory_bandwidth: float  # bytes read and written per second
    host_bandwidth: float | None  # bytes per second between host and device, the slower way; None on CPU
    collective_bandwidth: float | None  # bytes per second that each process receives; None with one device
    memory_bytes: int  # that processes can have
    framework_bytes: int  # that a process takes of it before it has any tensor

    def shared_by(self, processes: int) -> "Calibration":
        """What each of several processes has of the device, as of a CPU."""
        return replace(
            self,
            flops={dtype: flops / processes for dtype, flops in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth / processes,
            memory_bytes=self.memory_bytes // processes,
        )

    def told(self) -> str:
        """When and where, for a person."""
        return f"{self.date[:10]} on {self.machine} with torch {self.torch_version}"


def calibration_file() -> Path:
    """Where measurements are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "cohort" / "calibration.json"


def keep_calibration(measured: Calibration) -> Path:
    """Write a measurement beside those of other devices and machines.

    Returns:
        the file.

    Raises:
        UserError: it cannot be written.
    """
    file = calibration_file()
    others = [c for c in _calibrations() if (c.device, c.machine) != (measured.device, measured.machine)]
    text = json.dumps({"version": VERSION, "measured": [asdict(c) for c in [*others, measured]]}, indent=2)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise UserError(f"--calibrate: {file} cannot be written: {error.strerror}; XDG_CACHE_HOME moves it") from error
    return file


def calibration_of(device: str) -> Calibration | None:
    """The latest measurement of a kind of device, on this machine rather than on others."""
    found = [c for c in _calibrations() if c.device == device]
    return max(found, key=lambda c: (c.machine == platform.node(), c.date), default=None)


def calibration_here() -> Calibration | None:
    """The latest measurement on this machine, of a GPU rather than of the CPU."""
    found = [c for c in _calibrations() if c.machine == platform.node()]
    return max(found, key=lambda c: (c.on_gpu, c.date), default=None)


def cpu_name() -> str:
    """Model and usable cores of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.processor() or platform.machine()}, {cores} cores"


def _calibrations() -> list[Calibration]:
    try:
        content = json.loads(calibration_file().read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return []
        return [_calibration(entry) for entry in content["measured"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _calibration(entry: Mapping[str, Any]) -> Calibration:
    """An entry of the file.

    Raises:
        ValueError: a number that cannot be.
    """
    found = Calibration(**{field.name: entry[field.name] for field in fields(Calibration)})
    numbers = [*found.flops.values(), found.memory_bandwidth, found.memory_bytes, found.framework_bytes]
    numbers += [n for n in (found.host_bandwidth, found.collective_bandwidth) if n is not None]
    if not all(n > 0 for n in numbers):
        raise ValueError(found)
    return found
