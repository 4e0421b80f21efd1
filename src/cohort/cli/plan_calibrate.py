"""Measure this machine's GPU, or CPU, for `cohort plan --calibrate`.

Times are the best of several, which is least affected by other load.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cohort.errors import TrainingError
from cohort.plan.calibration import Calibration, cpu_name
from cohort.processes.this_process import available_memory_bytes

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


def calibrate(device: torch.device | None = None, size: BenchmarkSize | None = None) -> Calibration:
    """Measure the first GPU, or the CPU if there is none.

    Args:
        device: device to measure instead.
        size: size of the benchmarks; chosen by device by default.

    Raises:
        TrainingError: a child process failed.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size or BenchmarkSize.default_for(device)
    on_gpu = device.type == "cuda"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    num_devices = torch.cuda.device_count() if on_gpu else 1
    return Calibration(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        on_gpu=on_gpu,
        machine=platform.node(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch_version=torch.__version__,
        flops={name: _product_flops(device, dtype, size) for name, dtype in dtypes.items()},
        memory_bandwidth=_memory_bandwidth(device, size),
        host_bandwidth=min(host_bandwidths(device, size)) if on_gpu else None,
        collective_bandwidth=collective_bandwidth(device.type, num_devices, size) if num_devices > 1 else None,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else available_memory_bytes(),
        framework_bytes=_framework_bytes_of_gpu(device) if on_gpu else _framework_bytes_of_cpu(),
    )


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


def _product_flops(device: torch.device, dtype: torch.dtype, size: BenchmarkSize) -> float:
    n = size.matrix
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2.0 * n**3 / _best_s(lambda: torch.mm(left, right, out=out), device, size.seconds)


def _memory_bandwidth(device: torch.device, size: BenchmarkSize) -> float:
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


def collective_bandwidth(device_type: str, num_processes: int, size: BenchmarkSize) -> float:
    """Bytes/s that each process receives in an all-gather."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        arguments = (device_type, num_processes, size, folder)
        try:
            mp.spawn(_measure_all_gather, arguments, nprocs=num_processes)
            return float(result.read_text(encoding="utf-8"))
        except Exception as error:  # whatever ended a child
            raise TrainingError(f"--calibrate: an all-gather of {num_processes} processes failed: {error}") from error


def _measure_all_gather(rank: int, device_type: str, num_processes: int, size: BenchmarkSize, folder: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=num_processes)
    own = torch.zeros(size.copied_bytes // num_processes, dtype=torch.uint8, device=device)
    parts = [torch.empty_like(own) for _ in range(num_processes)]
    times = []
    for _ in range(5):  # the same number on every rank
        dist.barrier()
        times.append(_best_s(lambda: dist.all_gather(parts, own), device, 0.0))
    if rank == 0:
        received = own.nbytes * (num_processes - 1)
        (Path(folder) / "result").write_text(str(received / min(times)), encoding="utf-8")
    dist.destroy_process_group()


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


def _framework_bytes_of_cpu() -> int:
    """Resident memory of a training process without a model."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CPU_PROCESS], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise TrainingError(f"--calibrate: a process that imports the trainer failed: {error}") from error
    return int(done.stdout)


def _framework_bytes_of_gpu(device: torch.device) -> int:
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
        raise TrainingError("--calibrate: a process that uses the GPU failed")
    return max(1, before - after - int(reserved))
