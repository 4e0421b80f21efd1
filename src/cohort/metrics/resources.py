"""Time, memory and speed of a step."""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from cohort.plan.hardware import peak_flops
from cohort.plan.timing import ModelFlops, model_flops


class PhaseClock:
    """Accumulates seconds per phase."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        """`on_phase` is called with the name of a phase as it begins."""
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase `name`; a phase may be entered repeatedly."""
        self._on_phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return and reset `time/{phase}_s` per phase and their sum `step_time`."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()} | {"step_time": sum(seconds.values())}


_PROC = Path("/proc/self")
_SLACK_BYTES = 16 << 20  # other threads may free memory between reset and reading


class PeakMemory:
    """Tracks peak memory: allocated by PyTorch on CUDA, resident elsewhere.

    The peak is reset at the start of each phase. If that is not possible (macOS, restricted kernels), only the overall
    peak is reported.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._overall = self._reserved = 0
        self._phases: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the peak of the block to phase `name`; a phase may be entered repeatedly."""
        self._overall, self._reserved = max(self._overall, self._read()), self._read_reserved()  # reset below
        was_reset = self._reset()
        try:
            yield
        finally:
            if was_reset:
                self._phases[name] = max(self._phases.get(name, 0), self._read())

    def take(self) -> dict[str, int]:
        """Return `memory/{phase}_peak_bytes` since the last call, and since the start `memory/peak_bytes`.

        On CUDA also `memory/reserved_peak_bytes`: what PyTorch's allocator took from the driver, fragments included.
        """
        phases, self._phases = self._phases, {}
        self._overall, self._reserved = max(self._overall, self._read(), *phases.values()), self._read_reserved()
        peaks = {f"memory/{name}_peak_bytes": peak for name, peak in phases.items()}
        peaks["memory/peak_bytes"] = self._overall
        return peaks | ({"memory/reserved_peak_bytes": self._reserved} if self._device.type == "cuda" else {})

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _resident_peak()

    def _read_reserved(self) -> int:
        """Peak since the start; 0 without CUDA."""
        is_cuda = self._device.type == "cuda"
        return max(self._reserved, torch.cuda.max_memory_reserved(self._device)) if is_cuda else 0

    def _reset(self) -> bool:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        return reset_resident_peak()


def largest_peaks(peaks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Maximum of each metric over all ranks."""
    names = dict.fromkeys(name for rank in peaks for name in rank)
    return {name: max(rank.get(name, 0) for rank in peaks) for name in names}


def _resident_peak() -> int:
    """Peak resident bytes since process start or the last reset."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident().get("VmHWM", peak if sys.platform == "darwin" else peak * 1024)


def reset_resident_peak() -> bool:
    """Reset the peak to the current resident size (Linux: clear_refs in proc(5)); return whether it worked."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    values = resident()
    # a kernel that emulates Linux may ignore the write
    return bool(values) and values["VmHWM"] - values["VmRSS"] < _SLACK_BYTES


def resident_now() -> int:
    """Resident bytes."""
    return int(psutil.Process().memory_info().rss)


def resident() -> dict[str, int]:
    """Current (VmRSS) and resettable peak (VmHWM) resident bytes; empty if the system is not Linux."""
    try:
        status = (_PROC / "status").read_text()
    except OSError:
        return {}
    return {key: 1024 * int(kb) for key, kb in re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.MULTILINE)}


def flops_of(model: Any) -> ModelFlops:
    """FLOPs of a loaded Hugging Face model; if sharded, of the whole model."""
    # a 4-bit parameter packs two weights per byte in one column; its quant_state has the weight's shape
    parameters = (
        (name, tuple(getattr(getattr(p, "quant_state", p), "shape", p.shape)), p.requires_grad)
        for name, p in model.named_parameters()
    )
    return model_flops(parameters, model.config.get_text_config().to_dict())


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device in `dtype`; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."), tf32=tf32)


def speed_metrics(flops: float, *, seconds: float, num_processes: int, peak: float | None) -> dict[str, float]:
    """Compute `model_tflops_per_second` per process and, if the peak is known, `mfu`.

    Args:
        flops: model FLOPs of the step's training, over all processes.
        seconds: duration of the training.
        num_processes: number of processes, one device each.
        peak: peak FLOP/s of one device.
    """
    speed = flops / seconds / num_processes
    return {"model_tflops_per_second": speed / 1e12} | ({"mfu": speed / peak} if peak else {})
