"""The command line in tests: a small run to give it, how it ended, and what a refusal looks like."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tiny import copy_task_rows, save_model_folder, write_jsonl
from waiting import PATIENCE_S

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# Python leaves signals ignored that its parent ignores, and a shell's background jobs ignore Ctrl-C.
_DEFAULT_SIGNALS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "cohort", *sys.argv[1:]])
"""


def start_command(*arguments: object) -> subprocess.Popen[str]:
    """Start the command line in a fresh interpreter that takes Ctrl-C, however the tests were started.

    In the environment as it is now: tests change PYTHONPATH.
    """
    command = [sys.executable, "-c", _DEFAULT_SIGNALS, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_script(script: Path, *, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a user's script to its end, by torchrun if it has several processes; it must not fail."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def assert_refused(ended: Ended, *parts: str, code: int = 2) -> None:
    """One message on stderr that has these parts, and nothing else."""
    assert ended.err.startswith("error: ")
    assert ended.err.count("error: ") == 1
    assert "Traceback" not in ended.err + ended.out
    for part in parts:
        assert part in ended.err
    assert ended.code == code


def set_up(folder: Path, *, files: dict[str, str] | None = None, **sections: Any) -> Path:
    """Model, data and run.yaml, whose path this is, of a run of 3 steps of 2 prompts x 2 generations in `folder/run`.

    A section that is a mapping changes keys of the configuration's; any other takes its place.
    """
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    if not (folder / "model").exists():
        save_model_folder(folder / "model")
    if not (folder / "data.jsonl").exists():
        write_jsonl(folder / "data.jsonl", copy_task_rows(6))
    raw: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "prompt": "question"},
        "rewards": [{"use": "exact"}],
        "rollout": {"num_generations": 2, "max_prompt_tokens": 32, "max_completion_tokens": 4},
        "train": {"steps": 3, "prompts_per_step": 2},
        "hardware": {"device": "cpu"},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 1},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
