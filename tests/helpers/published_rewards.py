"""The reward functions in `tests/rewards/published`: their data, and what calls of them return and log."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cohort.config import RewardConfig
from cohort.records import Prompt, RolloutGroup
from cohort.rewards import RewardFunction, RewardRunner, TrainerProgress, build_rewards
from samples import answer

SOURCE = Path(__file__).parents[1] / "rewards" / "published"
DATA: Mapping[str, Any] = json.loads((SOURCE / "completions.json").read_text(encoding="utf-8"))
USES: Mapping[str, list[str]] = {name: data["rewards"] for name, data in DATA.items()}
HANGS = "code that hangs"
QUICK = [name for name in DATA if name != HANGS]
STEPS = (0, 1)  # calls of each function, whose file keeps its state; functions see the progress of 4 steps
MAX_STEPS = 4


@dataclass
class Step:
    """What functions return and log in a step."""

    values: dict[str, list[float | None]]  # by `use`, one per completion of the data that it is for
    metrics: dict[str, float]
    extras: dict[str, list[str]]  # by column, without None


def copy_to(folder: Path) -> Path:
    """Copy the files of the functions; modules and what they write belong to the copy."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def inputs(name: str) -> dict[str, list[Any]]:
    """Return what TRL passes to functions, less what belongs to the trainer; one entry per completion."""
    rows = [(row, completion) for row in DATA[name]["rows"] for completion in row["completions"]]
    columns = [_columns(name, row) for row, _ in rows]
    return {
        "prompts": [row["prompt"] for row, _ in rows],
        "completions": [
            [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text for row, text in rows
        ],
        "completion_ids": [_ids(text) for _, text in rows],
        **{column: [values[column] for values in columns] for column in columns[0]},
    }


# Calls functions as a script would.
_DIRECT = """
import asyncio, importlib, inspect, json, math, operator, sys
from types import SimpleNamespace

uses, inputs, steps, max_steps = json.loads(sys.stdin.read())
loop = asyncio.new_event_loop()

def call(use, arguments, progress, metrics, extras):
    file, _, name = use.partition(".py:")
    function = operator.attrgetter(name)(importlib.import_module(file))
    returned = function(
        **arguments,
        trainer_state=progress,
        log_metric=lambda name, value: metrics.setdefault(name, []).append(value),
        log_extra=lambda name, values: extras.setdefault(name, []).extend(v for v in values if v is not None),
    )
    if inspect.isawaitable(returned):
        returned = loop.run_until_complete(returned)
    return [None if value is None or math.isnan(value) else float(value) for value in returned]

results = []
for step in steps:
    progress, metrics, extras = SimpleNamespace(global_step=step, max_steps=max_steps), {}, {}
    values = {use: call(use, inputs[name], progress, metrics, extras) for name in uses for use in uses[name]}
    metrics = {name: sum(values) / len(values) for name, values in metrics.items()}
    results.append({"values": values, "metrics": metrics, "extras": extras})
with open("direct.json", "w") as file:
    json.dump(results, file)
"""


def called_directly(names: Sequence[str], folder: Path) -> list[Step]:
    """Call the functions of these data in a fresh interpreter.

    Args:
        names: of the data.
        folder: where it starts, with a copy of the files.
    """
    content = [{name: USES[name] for name in names}, {name: inputs(name) for name in names}, STEPS, MAX_STEPS]
    command = [sys.executable, "-c", _DIRECT]
    done = subprocess.run(command, input=json.dumps(content), capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [Step(**step) for step in json.loads((folder / "direct.json").read_text())]


def load(names: Iterable[str], *, only: Sequence[str] | None = None, isolate: bool = False) -> list[RewardFunction]:
    """Load the functions of these data as a run does. Each is for its own data.

    Args:
        names: of the data.
        only: functions. Default: all.
        isolate: run each in a child process.
    """
    configs = [
        RewardConfig(use=use, name=use, where={"data": name}, isolate=isolate)
        for name in names
        for use in USES[name]
        if only is None or use in only
    ]
    columns = {column for name in names for row in DATA[name]["rows"] for column in _columns(name, row)}
    return list(build_rewards(configs, columns=["prompt", *sorted(columns)], max_completion_tokens=64))


def scored(functions: Sequence[RewardFunction], names: Iterable[str]) -> list[Step]:
    """Score these data with a runner."""
    runner = RewardRunner(functions, columns=["prompt"], prompt_column="prompt")
    groups = [_group(name, row) for name in names for row in DATA[name]["rows"]]
    steps = []
    for step in STEPS:
        progress = TrainerProgress(global_step=step, max_steps=MAX_STEPS)
        runner.trainer_progress = lambda progress=progress: progress
        results = runner.score(groups)
        steps.append(Step(values={}, metrics=runner.take_logged({}), extras={}))
        for f in runner.functions:
            own = [g for g in results if g.prompt.columns["data"] == f.where["data"]]
            steps[-1].values[f.name] = [None if v != v else v for g in own for v in g.reward_parts[f.name].tolist()]
        for column in results[0].reward_details:
            steps[-1].extras[column] = [v for g in results for v in g.reward_details[column] if v is not None]
    return steps


def _group(name: str, row: Mapping[str, Any]) -> RolloutGroup:
    prompt = Prompt(id=0, epoch=0, content=row["prompt"], token_ids=np.array([1, 2]), columns=_columns(name, row))
    return RolloutGroup(
        prompt=prompt, trajectories=tuple(answer(prompt, _ids(text), text=text) for text in row["completions"])
    )


def _columns(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": name} | {column: value for column, value in row.items() if column not in ("prompt", "completions")}


def _ids(text: str) -> list[int]:
    return [len(word) for word in text.split()]
