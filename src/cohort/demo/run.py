"""`cohort demo`: an ordinary run on the small base model, with a summary of what it learned."""

from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from cohort.config import Config, config_from_dict, to_yaml
from cohort.demo import base_model, task
from cohort.display import on_one_line, render_curve
from cohort.launch import train
from cohort.run_folder import check_folder
from cohort.run_result import RunResult
from cohort.startup import resume_gc

NUM_TRAIN, NUM_HELDOUT = 2048, 256
SAMPLES_SHOWN = 3


def run_demo(*, seed: int, out: Path | None, processes: int = 1, engine: str = "local") -> RunResult:
    """Train the base model on word problems and show the result.

    Args:
        seed: seed of the training problems, their order and sampling. Held-out problems are always the same.
        out: run folder; by default runs/demo, or the next free runs/demo-N.
        processes: number of training processes; the run is the same for any.
        engine: rollout engine.
    """
    console = Console(highlight=False)
    folder = out or free_folder(Path("runs"))
    config = demo_config(folder, seed=seed, processes=processes, engine=engine)
    write_data(folder, config, seed=seed)
    console.print(
        "A model with 0.46 million parameters learns word problems by GRPO: it never sees a "
        "solution, only whether its answer is right.",
        soft_wrap=True,
    )
    result = train(config)
    _print_result(console, result)
    return result


def demo_config(folder: Path, *, seed: int, processes: int = 1, engine: str = "local") -> Config:
    """Return the demo's configuration, which `cohort train` can run too."""
    return config_from_dict(
        {
            "model": {"path": str(base_model.BASE_PATH)},
            "data": {"path": str(folder / "data" / "train.jsonl"), "prompt": "question"},
            "rewards": [{"use": "exact", "name": "right", "args": {"pattern": base_model.ANSWER_PATTERN}}],
            "rollout": {
                "engine": engine,
                "num_generations": 16,
                "max_prompt_tokens": 128,
                "max_completion_tokens": base_model.MAX_COMPLETION_TOKENS,
            },
            "algorithm": {"name": "grpo"},
            "train": {
                "steps": 50,
                "prompts_per_step": 16,
                "learning_rate": 1e-4,
                "lr_schedule": "linear",
                "seed": seed,
            },
            "optim": {"beta2": 0.99},
            "eval": {"path": str(folder / "data" / "heldout.jsonl"), "every": 5},
            "hardware": {"processes": processes},
            "run": {"dir": str(folder), "checkpoint_every": 20, "show_completions_every": 15},
        }
    )


def rebuild(out: Path | None) -> None:
    """Rebuild the base model in `out`, or in place of the packaged one."""
    resume_gc()
    results = base_model.rebuild(out or base_model.BASE_PATH)
    accuracy = results["greedy_accuracy"]
    print(f"written to {out or base_model.BASE_PATH}; greedy accuracy on held-out problems {accuracy:.1%}")


def free_folder(root: Path) -> Path:
    """Return `root/demo`, or the first of demo-2, demo-3, ... that does not exist."""
    folder, number = root / "demo", 1
    while folder.exists():
        number += 1
        folder = root / f"demo-{number}"
    return folder


def write_data(folder: Path, config: Config, *, seed: int) -> None:
    """Write the problems and the configuration as files for inspection and reuse."""
    check_folder(folder, resume=False)
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return  # an earlier demo in this folder: `train` resumes the same one and rejects another
    (folder / "data").mkdir(parents=True, exist_ok=True)
    # written first, so that the folder is recognized as a run's if the data is interrupted
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    task.write_jsonl(folder / "data" / "train.jsonl", task.generate(seed, NUM_TRAIN, split="train"))
    task.write_jsonl(folder / "data" / "heldout.jsonl", task.generate(0, NUM_HELDOUT, split="heldout"))


def _print_result(console: Console, result: RunResult) -> None:
    summary = result.summary
    accuracies = {int(step): accuracy for step, accuracy in summary["accuracy_by_step"].items()}
    steps = sorted(accuracies)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    console.print("\n[bold]Accuracy on held-out problems[/bold]")
    console.print(render_curve(steps, [accuracies[step] for step in steps]))
    for question, answer, old, new in _samples(result.run_dir, summary["steps"]):
        console.print(f"\n[dim]{escape(question)}[/dim]  (right: {escape(answer)})", soft_wrap=True)
        console.print(f"  before  {escape(on_one_line(old))}", soft_wrap=True)
        console.print(f"  after   {escape(on_one_line(new))}", soft_wrap=True)
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


def _samples(run_dir: Path, steps: int) -> list[tuple[str, str, str, str]]:
    """Return questions with answer, first and last completion; newly learned ones first."""
    first, last = (
        pq.read_table(run_dir / "completions" / f"eval-{step:06d}.parquet").to_pylist() for step in (0, steps)
    )
    answers = [problem.answer for problem in task.generate(0, NUM_HELDOUT, split="heldout")]
    rows = sorted(range(len(last)), key=lambda i: first[i]["reward"] - last[i]["reward"])  # stable: file order
    return [
        (last[i]["prompt"], str(answers[last[i]["prompt_id"]]), first[i]["completion"], last[i]["completion"])
        for i in rows[:SAMPLES_SHOWN]
    ]
