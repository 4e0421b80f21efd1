"""Load and save hardware measurements from `cohort plan --calibrate`.

`cohort/calibration.json` in `$XDG_CACHE_HOME` or `~/.cache` holds the latest measurement per device type and machine.
An unreadable file or one of another version is ignored.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from cohort.config.section import expand_home
from cohort.errors import UserError
from cohort.processes.this_process import usable_cores

VERSION = 1  # of the file format; raise it when a number changes its meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured speed and memory of one device; all CPU cores count as one device."""

    device: str  # driver's name of the GPU, or CPU model and cores
    on_gpu: bool
    machine: str  # host name
    date: str  # ISO 8601
    torch_version: str
    flops: Mapping[str, float]  # matmul FLOP/s by dtype
    memory_bandwidth: float  # bytes read and written per second
    host_bandwidth: float | None  # bytes/s between host and device, slower direction; None on CPU
    collective_bandwidth: float | None  # bytes/s received per process in an all-gather; None with one device
    memory_bytes: int  # available to processes
    framework_bytes: int  # taken by a process before its first tensor

    def per_process(self, processes: int) -> "Calibration":
        """Divide a device, such as the CPU, evenly among processes."""
        return replace(
            self,
            flops={dtype: flops / processes for dtype, flops in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth / processes,
            memory_bytes=self.memory_bytes // processes,
        )

    def describe(self) -> str:
        """Date, machine and torch version in words."""
        return f"{self.date[:10]} on {self.machine} with torch {self.torch_version}"


def calibration_file() -> Path | None:
    """Path of the calibration file; None for a user without a home folder."""
    try:
        cache = expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    except ValueError:
        return None
    return Path(cache) / "cohort" / "calibration.json"


def save_calibration(measured: Calibration) -> Path:
    """Save a measurement, replacing an older one of the same device and machine.

    Returns:
        Path of the file.

    Raises:
        UserError: there is no place for the file, or it cannot be written.
    """
    file = calibration_file()
    if file is None:
        raise UserError("--calibrate: this user has no home folder to save in; set XDG_CACHE_HOME to a writable folder")
    others = [c for c in _calibrations() if (c.device, c.machine) != (measured.device, measured.machine)]
    text = json.dumps({"version": VERSION, "measured": [asdict(c) for c in [*others, measured]]}, indent=2)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise UserError(
            f"--calibrate: cannot write {file}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return file


def find_calibration(device: str) -> Calibration | None:
    """Latest measurement of a device type, preferring this machine."""
    found = [c for c in _calibrations() if c.device == device]
    return max(found, key=lambda c: (c.machine == platform.node(), c.date), default=None)


def local_calibration() -> Calibration | None:
    """Latest measurement on this machine, preferring a GPU."""
    found = [c for c in _calibrations() if c.machine == platform.node()]
    return max(found, key=lambda c: (c.on_gpu, c.date), default=None)


def cpu_name() -> str:
    """Model and usable cores of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {usable_cores()} cores"


def _calibrations() -> list[Calibration]:
    file = calibration_file()
    try:
        content = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return []
        names = [field.name for field in fields(Calibration)]
        return [Calibration(**{name: entry[name] for name in names}) for entry in content["measured"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
