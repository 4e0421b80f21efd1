"""Peak memory of this process, over all and by phase of a step."""

import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

_PROC = Path("/proc/self")
_SLACK_BYTES = 16 << 20  # other threads may free memory between setting the peak back and reading it


class PeakMemory:
    """The most that this process has held: on CUDA in the allocator, elsewhere resident.

    The peak is set back when a phase begins. Where it cannot be (macOS, or a kernel that does not allow it), phases
    have no peak and the overall one is still right.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._overall = 0
        self._phases: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block towards `name`; a phase may be entered several times."""
        self._overall = max(self._overall, self._read())  # the next line forgets it
        was_reset = self._reset()
        try:
            yield
        finally:
            if was_reset:
                self._phases[name] = max(self._phases.get(name, 0), self._read())

    def take(self) -> dict[str, int]:
        """`memory/{phase}_peak_bytes` of the phases since the last call, and `memory/peak_bytes` since the start."""
        phases, self._phases = self._phases, {}
        self._overall = max(self._overall, self._read(), *phases.values())
        return {f"memory/{name}_peak_bytes": peak for name, peak in phases.items()} | {
            "memory/peak_bytes": self._overall
        }

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _resident_peak()

    def _reset(self) -> bool:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        return reset_resident_peak()


def largest_peaks(peaks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The largest of each name over all ranks."""
    names = dict.fromkeys(name for rank in peaks for name in rank)
    return {name: max(rank.get(name, 0) for rank in peaks) for name in names}


def _resident_peak() -> int:
    """Bytes; since the start of the process, or since it was set back."""
    try:
        return resident()["VmHWM"]
    except (OSError, KeyError):  # no Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_resident_peak() -> bool:
    """Set the peak back to what is resident now, with Linux's interface for it (proc(5), clear_refs)."""
    try:
        (_PROC / "clear_refs").write_text("5")
        values = resident()
        # a kernel that emulates Linux may take the word and do nothing
        return values["VmHWM"] - values["VmRSS"] < _SLACK_BYTES
    except (OSError, KeyError):
        return False


def resident_now() -> int:
    """Bytes that are resident; the most that were, where the system does not tell."""
    try:
        return resident()["VmRSS"]
    except (OSError, KeyError):
        return _resident_peak()


def resident() -> dict[str, int]:
    """Bytes that are resident (VmRSS), and the most that were (VmHWM)."""
    status = (_PROC / "status").read_text()
    return {key: 1024 * int(kb) for key, kb in re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.MULTILINE)}
