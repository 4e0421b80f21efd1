"""Whole small runs, and what they leave behind."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import cohort
from cohort.display import Display, StepReport
from cohort.metrics.catalogue import describe
from forked import fork
from tiny import copy_task_rows, save_model_folder, write_jsonl
from waiting import PATIENCE_S

REWARDS = '''
"""Rewards in TRL's signature."""

def digit(prompts, completions, answer, **kwargs):
    return [float(a in c) + 0.1 * sum(x.isdigit() for x in c) / max(1, len(c)) for c, a in zip(completions, answer)]

async def brevity(completions, completion_ids, level, **kwargs):
    assert len(level) == len(completions)
    return [None if n == 3 else -len(ids) / 16 for ids, n in zip(completion_ids, level)]
'''


def make_inputs(folder: Path, kind: str = "llama", **model: Any) -> dict[str, Any]:
    """A model, data and rewards as files, and a configuration of 6 quick steps."""
    save_model_folder(folder / "base", kind, **model)
    write_jsonl(folder / "train.jsonl", copy_task_rows(40))
    write_jsonl(folder / "heldout.jsonl", copy_task_rows(10, start=40))
    (folder / "my_rewards.py").write_text(REWARDS)
    return {
        "model": {"path": str(folder / "base")},
        "data": {"path": str(folder / "train.jsonl"), "prompt": "question"},
        "rewards": [
            {"use": f"{folder}/my_rewards.py:digit"},
            {"use": f"{folder}/my_rewards.py:brevity", "weight": 0.1},
        ],
        "rollout": {"num_generations": 4, "max_prompt_tokens": 64, "max_completion_tokens": 12},
        "train": {"steps": 6, "prompts_per_step": 3, "micro_batch_tokens": 256, "learning_rate": 1e-2},
        "eval": {"path": str(folder / "heldout.jsonl"), "every": 3, "success_threshold": 0.5},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 2},
    }


def changed(config: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**config, **{name: {**config.get(name, {}), **keys} for name, keys in sections.items()}}


def train(config: dict[str, Any], **kwargs: Any) -> cohort.RunResult:
    return cohort.train(config, display=Display(), **kwargs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(actual: Path, expected: Path) -> None:
    a, b = weights(actual), weights(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def metric(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def assert_in_catalogue(run: Path) -> None:
    """Every metric that a run wrote has a group and a meaning."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "kind", "timestamp"}
    assert names and not {name for name in names if not describe(name).meaning}


def stop_after(steps: int) -> Display:
    class Interrupt(Display):
        def step(self, report):
            if report.steps_done == steps:
                raise KeyboardInterrupt

    return Interrupt()


def in_a_process(target: Callable[..., Any], config: dict[str, Any], *arguments: object) -> int | None:
    """How a process ends that calls `target` with the configuration and arguments."""
    # bit for bit needs the same number of threads: that of this process
    said = Path(config["run"]["dir"]).with_name("said")
    process = fork(target, config, *arguments, out=said, OMP_NUM_THREADS=torch.get_num_threads())
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    return process.exitcode


def train_and_be_killed(config: dict[str, Any], at_step: int, delay_s: float) -> None:
    """Train in a process that is ended as by `kill -9` so many seconds after a step, and at most two steps later."""
    assert in_a_process(_train_until_killed, config, at_step, delay_s) == -signal.SIGKILL


def _train_until_killed(config: dict[str, Any], at_step: int, delay_s: float) -> None:
    cohort.train(config, display=Killed(at_step, delay_s))


class Killed(Display):
    """Ends this process as `kill -9` does, so many seconds after a step, and at most two steps later."""

    def __init__(self, at_step: int, delay_s: float) -> None:
        self.at_step = at_step
        self.killer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))

    def step(self, report: StepReport) -> None:
        if report.steps_done == self.at_step:
            self.killer.start()
        elif report.steps_done == self.at_step + 2:
            self.killer.join()


class Notes(Display):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def notify(self, text: str) -> None:
        self.told.append(text)
