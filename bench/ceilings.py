"""What this machine's GPU, or CPU, reaches at best: matrix products, copies, and the memory of a process.

Times are the best of several, which is least affected by other load.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cohort.errors import TrainingError

_CHILD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSize:
    """Size and duration of the benchmarks."""

    matrix: int  # rows and columns
    copied_bytes: int
    seconds: float  # per benchmark, after warm-up

    @classmethod
    def default_for(cls, device: torch.device) -> "BenchmarkSize":
        """Large enough to saturate the device within seconds."""
        if device.type == "cuda":
            return cls(matrix=8192, copied_bytes=1 << 30, seconds=1.0)
        return cls(matrix=1536, copied_bytes=1 << 28, seconds=1.0)


def product_flops(device: torch.device, dtype: torch.dtype, size: BenchmarkSize) -> float:
    """FLOP/s of square matrix products."""
    n = size.matrix
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2.0 * n**3 / _best_s(lambda: torch.mm(left, right, out=out), device, size.seconds)


def _best_s(operation: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Shortest time of a call within `seconds` seconds of repetitions."""

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()  # warm-up: kernel selection and loading
    end, best = time.perf_counter() + seconds, timed()
    while time.perf_counter() < end:
        best = min(best, timed())
    return max(best, 1e-9)


def memory_bandwidth(device: torch.device, size: BenchmarkSize) -> float:
    """Bytes read and written per second in a copy."""
    source = torch.zeros(size.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size.copied_bytes / _best_s(lambda: target.copy_(source), device, size.seconds)


def host_bandwidths(device: torch.device, size: BenchmarkSize) -> tuple[float, float]:
    """Bytes/s from a GPU to pinned host memory, and back."""
    here = torch.zeros(size.copied_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(size.copied_bytes, dtype=torch.uint8, pin_memory=True)
    to_host, to_device = (
        size.copied_bytes / _best_s(way, device, size.seconds)
        for way in (lambda: host.copy_(here), lambda: here.copy_(host))
    )
    return to_host, to_device


_CPU_PROCESS = """
import cohort.trainer.setup, psutil, torch
torch.ones(64, 64) @ torch.ones(64, 64)
print(psutil.Process().memory_info().rss)
"""

_GPU_PROCESS = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
for dtype in (torch.float32, torch.bfloat16):
    torch.mm(*[torch.ones(1024, 1024, device=device, dtype=dtype)] * 2)
torch.cuda.synchronize(device)
print(torch.cuda.memory_reserved(device), flush=True)
sys.stdin.read()
"""


def framework_bytes_of_cpu() -> int:
    """Resident memory of a training process without a model."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CPU_PROCESS], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise TrainingError(f"a process that imports the trainer failed: {error}") from error
    return int(done.stdout)


def framework_bytes_of_gpu(device: torch.device) -> int:
    """GPU memory of a process besides its tensors: CUDA context, kernels, library workspaces."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    command = [sys.executable, "-c", _GPU_PROCESS, str(device.index or 0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stdout is not None
        reserved = child.stdout.readline()
        after = torch.cuda.mem_get_info(device)[0]
        child.communicate(timeout=_CHILD_TIMEOUT_S)
    if not reserved.strip().isdecimal():
        raise TrainingError("a process that uses the GPU failed")
    return max(1, before - after - int(reserved))
