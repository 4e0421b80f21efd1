"""Hardware of a plan: known GPUs, this machine's CPU, and `cohort plan`'s options for them."""

import platform
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cohort.config.section import parse_size
from cohort.errors import UserError
from cohort.plan.lengths import Lengths
from cohort.processes.this_process import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an earlier run took per step, as multiples of the times in its plan."""

    training: float
    sampling: float
    run: str
    device: str
    engine: str
    reward_s: float = 0.0
    lengths: Lengths | None = None  # of its completions; None: unknown, and part of the multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Identical nodes with identical GPUs or, without GPUs, with processes that share the CPU."""

    gpu_name: str  # driver's name
    gpu_memory_bytes: int
    gpus_per_node: int
    nodes: int
    on_gpu: bool = True
    pace: Pace | None = None  # of an earlier run; without it a CPU has no times
    peak_flops: float | None = None  # of matrix products; None: from the data sheet
    bandwidth: float | None = None  # of memory in bytes/s; None: from the data sheet
    lengths: Lengths | None = None  # of completions in this plan; None: all have the maximum length
    memory_is_measured: bool = False
    resident_bytes: int | None = None  # of a CPU process that plans its own run, before it loads a model

    @property
    def num_gpus(self) -> int:
        """Number of GPUs over all nodes."""
        return self.gpus_per_node * self.nodes


_TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
_DATA_SHEETS: Mapping[str, Mapping[str, float]] = _TABLES["data_sheets"]
_NOT_IN_NAMES = re.compile(
    r"nvidia|geforce|tesla|amd|instinct|rtx|sxm\d?|hbm\d?e?"
)  # of GPUs with one form in the table
_SIZE_TOLERANCE = 0.15  # of the memory in a name, which is more than a process gets
# Driver's name and memory available to a process.
GPUS: dict[str, tuple[str, int]] = {key: (gpu["name"], gpu["memory_bytes"]) for key, gpu in _TABLES["gpus"].items()}


def hardware(
    *,
    gpu: str,
    gpus: int,
    nodes: int,
    gpu_memory: str | None,
    tflops: float | None = None,
    bandwidth: str | None = None,
) -> Hardware:
    """Parse the hardware options of `cohort plan`.

    Raises:
        UserError: an unknown GPU without all of its numbers, or an invalid size.
    """
    known = find_gpu(gpu)
    if known is None and None in (gpu_memory, tflops, bandwidth):
        raise UserError(
            f"--gpu: {gpu!r} is unknown; use one of {', '.join(GPUS)}, or give --gpu-memory, --gpu-tflops and "
            f"--gpu-bandwidth"
        )
    name, memory = GPUS[known] if known is not None else (gpu, 0)
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=memory if gpu_memory is None else parse_bytes(gpu_memory, option="--gpu-memory"),
        gpus_per_node=gpus,
        nodes=nodes,
        peak_flops=None if tflops is None else tflops * 1e12,
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth, option="--gpu-bandwidth"),
    )


def find_gpu(text: str) -> str | None:
    """Return the key in `GPUS` of a GPU as people name it, such as RTX 4090, a100-80gb or H100-SXM; None if unknown."""
    words = [word for word in re.split(r"[\s_-]+", text.lower()) if not _NOT_IN_NAMES.fullmatch(word)]
    name, *sizes = [re.sub(r"^(rtx|nvidia)", "", word) for word in words] or [""]
    whole = "-".join([name, *sizes])
    if whole in GPUS or not sizes:
        return whole if whole in GPUS else None
    size = re.fullmatch(r"([1-9]\d*)(gb|gib)?", "".join(sizes))
    if size is None:
        return None
    for key, (_, memory) in GPUS.items():
        if key.split("-")[0] == name and abs(memory / 2**30 / int(size[1]) - 1) < _SIZE_TOLERANCE:
            return key
    return None


def local_cpu(
    processes: int, *, nodes: int = 1, memory: str | None = None, resident_bytes: int | None = None
) -> Hardware:
    """This machine's CPU, shared by `processes` processes.

    Args:
        processes: processes per node.
        nodes: number of machines like this one.
        memory: memory per process, such as 16GB; by default an equal share of the machine's.
        resident_bytes: resident memory of a process that plans its own run, before it loads a model.

    Raises:
        UserError: an invalid size.
    """
    there = psutil.virtual_memory().total // processes
    return Hardware(
        gpu_name=cpu_name(),
        gpu_memory_bytes=there if memory is None else parse_bytes(memory, option="--gpu-memory"),
        gpus_per_node=processes,
        nodes=nodes,
        on_gpu=False,
        memory_is_measured=memory is None,
        resident_bytes=resident_bytes,
    )


def cpu_name() -> str:
    """Model and usable cores of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {usable_cores()} cores"


def parse_bytes(text: str, *, option: str) -> int:
    """Parse a size such as 80GB (80,000,000,000 bytes) or 79.2GiB into bytes.

    Raises:
        UserError: not a size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"{option}: {text!r} {error}") from None


# Data sheets


def peak_flops(device_name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """Peak dense FLOP/s of a GPU; None for an unknown one.

    Args:
        device_name: Driver's name, such as "NVIDIA H100 80GB HBM3".
        dtype: dtype of the matmuls, such as "bfloat16".
        tf32: whether float32 matmuls may use TF32.
    """
    keys = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "tf32" if tf32 else "float32"}
    return _peak(device_name, keys.get(dtype, dtype))


def memory_bandwidth(device_name: str) -> float | None:
    """Peak memory bandwidth of a GPU in bytes/s; None for an unknown one."""
    return _peak(device_name, "memory")


def link_bandwidth(device_name: str) -> float | None:
    """Bandwidth of a GPU's links to the others of its node, in bytes/s per direction; None: the bus."""
    return _peak(device_name, "link")


def _peak(device_name: str, key: str) -> float | None:
    words = f" {device_name} ".replace("-", " ")
    sheet: Mapping[str, float] = next((sheet for name, sheet in _DATA_SHEETS.items() if f" {name} " in words), {})
    return sheet[key] * 1e12 if key in sheet else None
