"""`cohort demo`: an ordinary run on the small base model, with a summary of what it learned."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from cohort.config import Config, config_from_dict, to_yaml
from cohort.demo.tasks import WORDS, DemoTask, find_task
from cohort.demo.word_problems import write_jsonl
from cohort.display import on_one_line, render_curve
from cohort.display.trajectory import conversation_lines
from cohort.launch import train
from cohort.run.folder import check_folder, free_folder
from cohort.run.result import RunResult

NUM_TRAIN, NUM_HELDOUT = 2048, 256
SAMPLES_SHOWN = 3


def run_demo(
    *,
    task: str,
    seed: int,
    out: Path | None,
    processes: int = 1,
    engine: str = "local",
) -> RunResult:
    """Train a base model on a task and show the result.

    Args:
        task: name of the task.
        seed: seed of the training problems, their order and sampling. Held-out problems are always the same.
        out: run folder; by default runs/demo, or the next free runs/demo-N.
        processes: number of training processes; the run is the same for any.
        engine: rollout engine.
    """
    console = Console(highlight=False)
    folder = out or free_folder(Path("runs/demo"))
    chosen = find_task(task)
    config = demo_config(folder, task=chosen, seed=seed, processes=processes, engine=engine)
    write_data(folder, config, task=chosen, seed=seed)
    console.print(chosen.intro, soft_wrap=True)
    console.print(f"To watch it learn, in another terminal: {view_command(folder)}", soft_wrap=True)
    result = train(config)
    _print_result(console, result)
    return result


def demo_config(
    folder: Path,
    *,
    task: DemoTask = WORDS,
    base: Path | None = None,
    seed: int,
    processes: int = 1,
    engine: str = "local",
) -> Config:
    """Return a demo's configuration, which `cohort train` can run too. `base` replaces the task's base model."""
    return config_from_dict(
        {
            "model": {"path": str(base or task.base_path)},
            "data": {"path": str(folder / "data" / "train.jsonl"), "prompt": "question"},
            "rewards": [task.reward],
            **({"sandbox": dict(task.sandbox)} if task.sandbox else {}),
            "rollout": {"engine": engine, "num_generations": 16, **task.rollout},
            "algorithm": {"name": "grpo"},
            "train": {"prompts_per_step": 16, "lr_schedule": "linear", "seed": seed, **task.train},
            "optim": {"beta2": 0.99},
            "eval": {"path": str(folder / "data" / "heldout.jsonl"), "every": 5},
            "hardware": {"processes": processes},
            "run": {"dir": str(folder), "checkpoint_every": 20, "show_completions_every": 15, "record_tokens": True},
        }
    )


def write_data(folder: Path, config: Config, *, task: DemoTask = WORDS, seed: int) -> None:
    """Write the problems and the configuration as files for inspection and reuse."""
    check_folder(folder, resume=False)
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return  # an earlier demo in this folder: `train` resumes the same one and rejects another
    (folder / "data").mkdir(parents=True, exist_ok=True)
    # written first, so that the folder is recognized as a run's if the data is interrupted
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    write_jsonl(folder / "data" / "train.jsonl", task.generate(seed, NUM_TRAIN, "train"))
    write_jsonl(folder / "data" / "heldout.jsonl", task.generate(0, NUM_HELDOUT, "heldout"))
    if task.development is not None:
        write_jsonl(folder / "data" / "development.jsonl", task.development(NUM_HELDOUT))


def _print_result(console: Console, result: RunResult) -> None:
    summary = result.summary
    accuracies = {int(step): accuracy for step, accuracy in summary["accuracy_by_step"].items()}
    steps = sorted(accuracies)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    console.print("\n[bold]Accuracy on held-out problems[/bold]")
    console.print(render_curve(steps, [accuracies[step] for step in steps]))
    for sample in _samples(result.run_dir, summary["steps"]):
        answer = escape(on_one_line(sample.answer))
        console.print(f"\n[dim]{escape(sample.question)}[/dim]  (right: {answer})", soft_wrap=True)
        for when, lines in (("before", sample.before), ("after", sample.after)):
            for number, line in enumerate(lines):
                console.print(f"  {when if number == 0 else '':<6}  {escape(on_one_line(line))}", soft_wrap=True)
    console.print(
        f"\n[bold]Accuracy {before:.1%} before, {after:.1%} after {summary['steps']} steps in "
        f"{summary['seconds']:.0f} s[/bold] (seed {summary['seed']})"
    )
    for what, path in (
        ("trained model", result.final_dir),
        ("every completion", result.run_dir / "completions"),
        ("metrics", result.run_dir / "metrics.jsonl"),
        ("configuration", result.run_dir / "config.yaml"),
    ):
        console.print(f"  {what:<17} {path}", soft_wrap=True)
    console.print(f"  {'page of the run':<17} {view_command(result.run_dir)}", soft_wrap=True)


def view_command(run_dir: Path) -> str:
    """Return the command that shows a run, with the path of `cohort` if a shell would not find it."""
    program = Path(sys.argv[0])
    found = program.name != "cohort" or shutil.which("cohort") == str(program.absolute())
    return shlex.join(["cohort" if found else os.path.relpath(program), "view", os.path.relpath(run_dir)])


@dataclass(frozen=True, slots=True)
class _Sample:
    """A held-out problem with the first and the last trajectory, in lines."""

    question: str
    answer: str
    before: list[str]
    after: list[str]


def _samples(run_dir: Path, steps: int) -> list[_Sample]:
    """Return samples of the evaluations before and after training; newly learned and long ones first."""
    first, last = (
        pq.read_table(run_dir / "completions" / f"eval-{step:06d}.parquet").to_pylist() for step in (0, steps)
    )
    problems = [json.loads(line) for line in (run_dir / "data" / "heldout.jsonl").read_text().splitlines()]
    has_turns = "messages" in last[0]

    def merit(row: int) -> tuple[float, int]:
        gain = (last[row]["reward"] or 0.0) - (first[row]["reward"] or 0.0)  # None if a tool broke the trajectory
        return gain, len(_lines(last[row])) if has_turns else 0

    rows = sorted(range(len(last)), key=merit, reverse=True)  # stable: file order
    return [
        _Sample(last[i]["prompt"], problems[last[i]["prompt_id"]]["answer"], _lines(first[i]), _lines(last[i]))
        for i in rows[: 1 if has_turns else SAMPLES_SHOWN]
    ]


def _lines(row: Mapping[str, Any]) -> list[str]:
    """Lines of a trajectory: its messages, or its only completion."""
    return conversation_lines(json.loads(row["messages"])) if row.get("messages") else [row["completion"]]
