"""The tables of docs/benchmarks.md that say something about a GPU, each made by its own script."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rollouts import find_vllm
from harness import FailedError, SkippedError, run_command

BENCH = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A script, and how it is run on a GPU; `--quick` elsewhere."""

    script: str
    kind: str = ""  # of several tables of a script
    options: Sequence[str] = ()
    arguments: Sequence[str] = ()  # on a GPU
    about_s: float = 90.0  # an estimate for a GPU
    needs: Sequence[str] = ()  # packages without which there is no table
    compares_with: Sequence[str] = ()  # packages without which a row is missing
    needs_vllm: bool = False

    @property
    def name(self) -> str:
        """Of the part that makes it."""
        return f"{self.script}, {self.kind}" if self.kind else self.script


TABLES = (
    Table(script="training_step.py", kind="bfloat16", options=["--dtype", "bfloat16"],
          arguments=["--grid", "gpu", "--repeats", "1"], about_s=200.0, compares_with=["trl", "liger_kernel"]),
    Table(script="modes.py", about_s=150.0),
    Table(script="sampler.py"),
    Table(script="algorithms.py", arguments=["--seeds", "0", "--steps", "10", "--out", "{out}/algorithms"]),
    Table(script="trl_demo.py", needs=["trl"]),
    Table(script="vllm_servers.py", arguments=["--device", "cuda", "--parts", "sampling", "publish"], needs_vllm=True),
    Table(script="training_step.py", arguments=["--grid", "small", "--repeats", "1"], about_s=400.0,
          compares_with=["trl", "liger_kernel"]),
)  # fmt: skip


def run_table(table: Table, *, tiny: bool, out: Path, timeout_s: float) -> dict[str, Any]:
    """What a script prints.

    Args:
        table: the script.
        tiny: as quickly as it can be, on a CPU.
        out: a folder for files.
        timeout_s: the longest that it may take.

    Raises:
        SkippedError: it needs a package that is not installed.
        FailedError: it failed, or took too long.
    """
    missing = [name for name in table.needs if not _is_installed(name)]
    if missing:
        raise SkippedError(f"needs {', '.join(missing)}, not installed")
    if table.needs_vllm:
        find_vllm()
    arguments = ["--quick"] if tiny else [argument.format(out=out) for argument in table.arguments]
    arguments += table.options
    if not tiny:
        out.mkdir(parents=True, exist_ok=True)
    added = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    done = run_command([sys.executable, str(BENCH / table.script), *arguments], added, timeout_s=timeout_s)
    if done.returncode:
        raise FailedError(f"{table.script} ended with {done.returncode}:\n{done.stderr[-3000:]}", done.stdout)
    left_out = [f"rows with {name}: not installed" for name in table.compares_with if not _is_installed(name)]
    return {"output": done.stdout, "left_out": left_out}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
