"""The machines of a plan: GPUs by the names that people use for them, and sizes as people write them."""

import os
from dataclasses import dataclass

from cohort.config.hardware import MOST_PROCESSES
from cohort.config.sizes import parse_size
from cohort.errors import UserError
from cohort.plan.calibration import Calibration, calibration_here, calibration_of, cpu_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes with the same number of the same GPUs; without GPUs, of processes that share a CPU."""

    gpu_name: str  # as the driver tells it
    gpu_memory_bytes: int
    gpus_per_node: int
    nodes: int
    on_gpu: bool = True
    measured: Calibration | None = None  # of one of the GPUs, or of one process's share of the CPU
    memory_is_measured: bool = False
    resident_bytes: int | None = None  # of a process on the CPU that plans for itself, and has no model yet

    @property
    def num_gpus(self) -> int:
        """Over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def framework_bytes(self) -> int | None:
        """What a process takes before it has any tensor; None where nobody measured that."""
        if self.resident_bytes is not None:
            return self.resident_bytes
        return self.measured.framework_bytes if self.measured else None


# As their drivers name them, and the memory that a process can have of them.
GPUS: dict[str, tuple[str, int]] = {
    "b200": ("NVIDIA B200", 191_000_000_000),
    "h200": ("NVIDIA H200", 150_000_000_000),
    "h100": ("NVIDIA H100 80GB HBM3", 85_000_000_000),
    "a100": ("NVIDIA A100-SXM4-80GB", 85_000_000_000),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 42_300_000_000),
    "l40s": ("NVIDIA L40S", 47_700_000_000),
    "l20": ("NVIDIA L20", 47_700_000_000),
    "l4": ("NVIDIA L4", 23_600_000_000),
    "a10": ("NVIDIA A10", 23_600_000_000),
    "4090": ("NVIDIA GeForce RTX 4090", 25_300_000_000),
    "3090": ("NVIDIA GeForce RTX 3090", 25_300_000_000),
}


def hardware(*, gpu: str, gpus: int, nodes: int, gpu_memory: str | None) -> Hardware:
    """The machines that the options of `cohort plan` name.

    Raises:
        UserError: a GPU, a size or a number that cannot be.
    """
    if gpu.lower() not in (*GPUS, "here"):
        raise UserError(
            f"--gpu: {gpu!r} is not known; use one of {', '.join(GPUS)}, and --gpu-memory if it has another, or here "
            f"for what `cohort plan --calibrate` has measured on this machine"
        )
    _check_numbers(gpus, nodes)
    if gpu.lower() == "here":
        measured = calibration_here()
        if measured is None:
            raise UserError("--gpu here: nothing was measured on this machine; run `cohort plan --calibrate` first")
        measured = measured if measured.on_gpu else measured.shared_by(gpus)
        name, memory = measured.device, measured.memory_bytes
    else:
        name, memory = GPUS[gpu.lower()]
        measured = calibration_of(name)
        memory = measured.memory_bytes if measured else memory
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=memory if gpu_memory is None else parse_bytes(gpu_memory, option="--gpu-memory"),
        gpus_per_node=gpus,
        nodes=nodes,
        on_gpu=measured is None or measured.on_gpu,
        measured=measured,
        memory_is_measured=measured is not None and gpu_memory is None,
    )


def cpu_here(
    processes: int, *, nodes: int = 1, memory: str | None = None, resident_bytes: int | None = None
) -> Hardware:
    """The CPU of this machine, shared by as many processes.

    Args:
        processes: of each node.
        nodes: machines like this one.
        memory: that each process has, such as 16GB; by default its share of what is there.
        resident_bytes: of a process that plans for itself, before it has a model.

    Raises:
        UserError: `memory` is no size, or a number that cannot be.
    """
    _check_numbers(processes, nodes)
    name = cpu_name()
    measured = calibration_of(name)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=there if memory is None else parse_bytes(memory, option="--gpu-memory"),
        gpus_per_node=processes,
        nodes=nodes,
        on_gpu=False,
        measured=measured.shared_by(processes) if measured else None,
        memory_is_measured=memory is None,
        resident_bytes=resident_bytes,
    )


def _check_numbers(gpus: int, nodes: int) -> None:
    for option, number in (("--gpus", gpus), ("--nodes", nodes)):
        if not 1 <= number <= MOST_PROCESSES:
            raise UserError(f"{option}: {number} must be a whole number from 1 to {MOST_PROCESSES:,}")


def parse_bytes(text: str, *, option: str) -> int:
    """Bytes of a size such as 80GB (80,000,000,000 bytes) or 79.2GiB.

    Raises:
        UserError: it is no size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"{option}: {text!r} {error}") from None
