"""Cohort without what Linux has and macOS lacks (`helpers/simulated_macos`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from commands import ENVIRONMENT, set_up
from selection import slow

_SIMULATION = Path(__file__).parent / "helpers" / "simulated_macos"
_REWARD = """
import sys

def on_macos(completions):
    return [float(sys.platform == "darwin") for _ in completions]
"""


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(_SIMULATION), ENVIRONMENT["PYTHONPATH"]])}
    environment.pop("OMP_NUM_THREADS", None)  # so that cores are counted
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )


@slow("the cores of each process, and what is refused")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_rewards_in_child_processes(tmp_path: Path, processes: int):
    path = set_up(
        tmp_path,
        files={"own.py": _REWARD},
        rewards=[{"use": "own.py:on_macos", "isolate": True}, {"use": "math"}],
        train={"steps": 1},
        hardware={"processes": processes},
    )
    done = run_python("-m", "cohort", "train", path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (metrics["rewards/on_macos/mean"], metrics["frac_unscored"], metrics["processes"]) == (1.0, 0.0, processes)
    assert metrics["memory/peak_bytes"] > 10 << 20 and "memory/train_peak_bytes" not in metrics
    start = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert start["command"] == f"python -m cohort train {path}"


def test_the_cores_of_each_process():
    """In a run of two processes, each has half of the machine's cores."""
    done = run_python("-c", "from cohort.launch.local import _threads; print(_threads(2))")
    assert done.stdout == f"{max(1, (psutil.cpu_count() or 1) // 2)}\n", done.stderr


def test_only_runs_whose_process_is_alive_run():
    """Also if another process has got the number of one that has ended."""
    tests = Path(__file__).parent / "cohort_view" / "test_run_state.py"
    done = run_python("-m", "pytest", tests, "-k", "process", "-p", "no:cacheprovider")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_the_sandbox_needs_linux():
    code = "from cohort.config.hardware import SandboxConfig; from cohort.sandbox import open_sandbox; "
    done = run_python("-c", code + "open_sandbox(SandboxConfig(confinement='none'))")
    assert "UserError: sandbox.backend: 'auto' runs code on Linux only" in done.stderr
