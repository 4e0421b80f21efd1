"""Hardware of a plan: known GPUs, this machine's CPU, and `cohort plan`'s options for them."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cohort.config.section import parse_size
from cohort.errors import UserError
from cohort.plan.calibration import Calibration, cpu_name, find_calibration, local_calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Identical nodes with identical GPUs or, without GPUs, with processes that share the CPU."""

    gpu_name: str  # driver's name
    gpu_memory_bytes: int
    gpus_per_node: int
    nodes: int
    on_gpu: bool = True
    calibration: Calibration | None = None  # of one GPU, or of one process's share of the CPU
    memory_is_measured: bool = False
    resident_bytes: int | None = None  # of a CPU process that plans its own run, before it loads a model

    @property
    def num_gpus(self) -> int:
        """Number of GPUs over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def framework_bytes(self) -> int | None:
        """Memory of a process before its first tensor; None if unmeasured."""
        if self.resident_bytes is not None:
            return self.resident_bytes
        return self.calibration.framework_bytes if self.calibration else None


_TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
_DATA_SHEETS: Mapping[str, Mapping[str, float]] = _TABLES["data_sheets"]
# Driver's name and memory available to a process.
_NOT_IN_NAMES = re.compile(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d?e?")  # of GPUs with one form in the table
_SIZE_TOLERANCE = 0.15  # of the memory in a name, which is more than a process gets
GPUS: dict[str, tuple[str, int]] = {key: (gpu["name"], gpu["memory_bytes"]) for key, gpu in _TABLES["gpus"].items()}


def hardware(*, gpu: str, gpus: int, nodes: int, gpu_memory: str | None) -> Hardware:
    """Parse the hardware options of `cohort plan`.

    Raises:
        UserError: an unknown GPU, or an invalid size.
    """
    known = "here" if gpu.lower() == "here" else find_gpu(gpu)
    if known is None:
        raise UserError(
            f"--gpu: {gpu!r} is unknown; use one of {', '.join(GPUS)}, the closest one with --gpu-memory, or here "
            f"for this machine as measured by `cohort plan --calibrate`"
        )
    if known == "here":
        measured = local_calibration()
        if measured is None:
            raise UserError("--gpu here: this machine has not been measured; run `cohort plan --calibrate` first")
        measured = measured if measured.on_gpu else measured.per_process(gpus)
        name, memory = measured.device, measured.memory_bytes
    else:
        name, memory = GPUS[known]
        measured = find_calibration(name)
        memory = measured.memory_bytes if measured else memory
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=memory if gpu_memory is None else parse_bytes(gpu_memory, option="--gpu-memory"),
        gpus_per_node=gpus,
        nodes=nodes,
        on_gpu=measured is None or measured.on_gpu,
        calibration=measured,
        memory_is_measured=measured is not None and gpu_memory is None,
    )


def find_gpu(text: str) -> str | None:
    """Return the key in `GPUS` of a GPU as people name it, such as RTX 4090, a100-80gb or H100-SXM; None if unknown."""
    words = [word for word in re.split(r"[\s_-]+", text.lower()) if not _NOT_IN_NAMES.fullmatch(word)]
    name, *sizes = [re.sub(r"^(rtx|nvidia)", "", word) for word in words] or [""]
    if not sizes:
        return name if name in GPUS else None
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
    name = cpu_name()
    measured = find_calibration(name)
    there = psutil.virtual_memory().total // processes
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=there if memory is None else parse_bytes(memory, option="--gpu-memory"),
        gpus_per_node=processes,
        nodes=nodes,
        on_gpu=False,
        calibration=measured.per_process(processes) if measured else None,
        memory_is_measured=memory is None,
        resident_bytes=resident_bytes,
    )


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


def _peak(device_name: str, key: str) -> float | None:
    words = f" {device_name} ".replace("-", " ")
    sheet: Mapping[str, float] = next(
        (sheet for name, sheet in _TABLES["data_sheets"].items() if f" {name} " in words), {}
    )
    return sheet[key] * 1e12 if key in sheet else None
