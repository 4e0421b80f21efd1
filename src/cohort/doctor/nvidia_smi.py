"""Read GPUs, driver and links from nvidia-smi, which works without torch and without a CUDA context."""

import re
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 20.0  # it takes seconds on large machines without persistence mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine, visible to this process or not."""

    name: str
    memory_bytes: int
    used_bytes: int  # by all processes
    driver: str


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none without nvidia-smi.

    Raises:
        OSError: the driver does not answer.
    """
    try:
        text = _run("--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return ()
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == 3]
    return tuple(
        Gpu(name=name, driver=driver, memory_bytes=_mebibytes(total), used_bytes=_mebibytes(used))
        for name, driver, total, used in rows
    )


def cuda_of_driver() -> str | None:
    """Return the newest version of CUDA that the driver supports; None if nvidia-smi does not say."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _run())
    return found[1] if found else None


def links() -> list[str]:
    """Return the kinds of links between GPUs, such as NV18 (NVLink), PIX or SYS (PCIe)."""
    rows = [line.split() for line in _run("topo", "-m").splitlines() if re.match(r"GPU\d+\s+\S", line)]
    return sorted({kind for row in rows[1:] for kind in row[1 : rows.index(row) + 1]})


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0  # "[N/A]" on GPUs that share the host's memory


def _run(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise OSError((done.stdout + done.stderr).strip().partition("\n")[0] or f"exit code {done.returncode}")
    return done.stdout
