"""Record runs that go wrong: short ones on the demo's model and problems, for the tests of what the page says first.

    python tests/health/record_runs.py [NAME ...]

Each takes about ten seconds and becomes `tests/health/recorded/NAME.json`: its configuration, the event that it ended
with, and the metrics that the rules read, as columns.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from cohort.config import to_yaml
from cohort.demo.run import demo_config, write_data

RECORDED = Path(__file__).with_name("recorded")
REWARDS = '''
"""Rewards that are gamed, that saturate, or that fail."""

_calls = []


def short(completions, completion_ids, **columns):
    return [1 / (1 + len(ids)) for ids in completion_ids]


def long(completions, completion_ids, **columns):
    return [len(ids) / 48 for ids in completion_ids]


def form(completions, **columns):
    return [0.125 * ("####" in text) for text in completions]


def fails(completions, **columns):
    _calls.append(None)
    if len(_calls) == 14:
        raise ValueError("the table of answers has no row 31")
    return short(completions, **columns)
'''
RIGHT = r"{use: exact, name: right, weight: WEIGHT, args: {pattern: '####\s*(-?\d+)\s*$'}}"
RUNS = {
    "hack2": (
        *("rewards=[RIGHT1, {use: 'FILE:long', weight: 3}]", "train.learning_rate=5e-4", "train.lr_schedule=constant"),
        *("train.steps=50", "rollout.temperature=1.5"),  # explores enough to find that length pays more
    ),
    "diverge": ("train.learning_rate=0.3", "train.lr_schedule=constant", "train.steps=20"),
    "collapse": ("rewards=[{use: 'FILE:short'}]", "train.learning_rate=1e-3", "train.steps=30"),
    "shrink": ("rewards=[RIGHT0.3, {use: 'FILE:short', weight: 2}]", "train.learning_rate=2e-4", "train.steps=50"),
    "hack": ("rewards=[RIGHT0.3, {use: 'FILE:form', weight: 2}]", "train.learning_rate=3e-4", "train.steps=40"),
    "crash": ("rewards=[{use: 'FILE:fails'}]", "train.steps=40"),
    "learns": ("train.learning_rate=3e-4", "train.steps=30"),
}
NUM_HELDOUT = 64
SIZES = ("train.prompts_per_step=8", "rollout.num_generations=8", "eval.every=5", "run.record_tokens=false")
READ = re.compile(
    r"step|reward.*|frac_.*|completions/(mean_length|clipped_ratio|trained_ratio)|entropy|kl|grad_norm|learning_rate|"
    r"eval/(accuracy|num_prompts)"
)


def train(folder: Path, changes: tuple[str, ...]) -> None:
    """Train a run in a folder."""
    config = demo_config(folder, seed=0)
    write_data(folder, config, seed=0)
    questions = folder / "data" / "heldout.jsonl"
    questions.write_text("".join(questions.read_text().splitlines(keepends=True)[:NUM_HELDOUT]))
    rewards, file = folder.with_name("rewards.py"), folder.with_suffix(".yaml")
    rewards.write_text(REWARDS)
    file.write_text(to_yaml(config))
    texts = [re.sub(r"RIGHT([\d.]+)", lambda found: RIGHT.replace("WEIGHT", found[1]), change) for change in changes]
    texts = [text.replace("FILE", str(rewards)) for text in texts]
    subprocess.run([sys.executable, "-m", "cohort", "train", str(file), *SIZES, *texts], check=False)


def record(folder: Path) -> dict[str, Any]:
    """Return what tests need of a run."""
    rows, events = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    kept = {section: config[section] for section in ("rewards", "rollout", "algorithm", "train", "eval")}
    end = {key: value for key, value in events[-1].items() if key in ("step", "event", "reason")}
    of_run = {"config": kept, "end": end} | {kind: _columns(rows, kind) for kind in ("train", "eval")}
    return json.loads(json.dumps(of_run).replace(f"{folder.parent}/", ""))


def _columns(rows: list[dict[str, Any]], kind: str) -> dict[str, list[float | None]]:
    of_kind = [row for row in rows if row["kind"] == kind]
    names = [name for name in dict.fromkeys(name for row in of_kind for name in row) if READ.fullmatch(name)]
    return {name: [_rounded(row.get(name)) for row in of_kind] for name in names}


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder) / name, RUNS[name])
            (RECORDED / f"{name}.json").write_text(json.dumps(record(Path(folder) / name)) + "\n")
