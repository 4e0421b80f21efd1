"""Does sampling prompts by their success pay? Completions until the same held-out accuracy, uniform and by success.

    python bench/prompt_sampling.py --out results [--seeds 0 1 2 3 4] [--prompts-per-step 8] [--steps 30] | --quick

Two sets of problems, each of `--prompts`: the demo's, and a mixture, of which a quarter is too hard for the base model
(the demo's words with numbers of three and four digits) and a quarter too easy (of `EASY_POOL` times as many problems
of the demo those that it solves most often). Each is trained on with uniform sampling, with dynamic sampling
(`rollout.resample: 3`), by success, and with both; the mixture also by success with the base model's pass rate of every
prompt, whose completions are not counted. Groups of 8, at a constant learning rate. Greedy accuracy on 128 held-out
problems of the demo every 16 prompts; what the table counts is interpolated between two evaluations. Results are kept
in `--out`, one file a run; what is there is not run again.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from cohort.config import Config, config_from_dict
from cohort.demo import word_problems
from cohort.demo.run import demo_config
from cohort.demo.word_problems import Problem
from cohort.display import Display
from cohort.launch import train
from cohort.trainer.without_training import sample_rows
from harness import machine, markdown

GENERATIONS = 8
HELDOUT = 128
EVALUATE_EVERY = 16  # prompts
EASY_POOL = 32
BY_SUCCESS = {"sampling": "by_success"}
METHODS: dict[str, tuple[dict[str, Any], int]] = {  # keys of `data`, and `rollout.resample`
    "uniform": ({}, 0),
    "dynamic sampling": ({}, 3),
    "by success": (BY_SUCCESS, 0),
    "both": (BY_SUCCESS, 3),
    "by success, pass rates known": ({**BY_SUCCESS, "pass_rate": "pass_rate"}, 0),
}
SETS = ("demo", "mixture")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, and how the accuracy went."""

    problems: str
    method: str
    seed: int
    completions: Sequence[int]  # sampled before each evaluation
    accuracies: Sequence[float]
    mixed: float  # share of the sampled groups with right and wrong completions
    seconds: float

    def completions_until(self, target: float) -> float | None:
        """Completions until the accuracy is first reached; None if it never is."""
        points = list(zip(self.completions, self.accuracies, strict=True))
        for (before, low), (after, high) in pairwise(points):
            if high >= target:
                return before + (after - before) * max(0.0, target - low) / (high - low) if high > low else before
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep results here")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.85, help="held-out accuracy")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.sets, args.seeds, args.steps, args.prompts = ["mixture"], [0], 2, 16
        args.methods = ["uniform", "by success, pass rates known"]
    elif args.out is None:
        parser.error("--out: give a folder for the results")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            kept_or_run(args.out or Path(folder), problems, method, seed=seed, args=args)
            for seed in args.seeds
            for problems in args.sets
            for method in args.methods
            if problems == "mixture" or "pass_rate" not in METHODS[method][0]
        ]
    print(machine())
    print(table(runs, args.target))


def kept_or_run(out: Path, problems: str, method: str, *, seed: int, args: argparse.Namespace) -> Run:
    """The run of that name, from its file where there is one."""
    settings = f"{args.prompts}-{args.prompts_per_step}-{args.steps}-seed{seed}"
    name = f"{problems}-{method.replace(',', '').replace(' ', '_')}-{settings}"
    file = out / f"{name}.json"
    if file.exists():
        return Run(**json.loads(file.read_text()))
    config = configuration(out / "runs" / name, method, seed=seed, args=args)
    write_problems(config, problems, args.prompts, seed=seed)
    if config.data.pass_rate:
        add_pass_rates(config, Path(str(config.data.path)))
    start = time.perf_counter()
    result = train(config, display=Display())
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    sampled = [0, *accumulate(int(row["num_groups"]) * GENERATIONS for row in steps)]
    accuracies = {int(step): value for step, value in result.summary["accuracy_by_step"].items()}
    run = Run(
        problems=problems,
        method=method,
        seed=seed,
        completions=[sampled[step] for step in accuracies],
        accuracies=list(accuracies.values()),
        mixed=sum((1 - r["frac_all_right"] - r["frac_all_wrong"]) * r["num_groups"] for r in steps)
        / sum(row["num_groups"] for row in steps),
        seconds=time.perf_counter() - start,
    )
    file.write_text(json.dumps(asdict(run), indent=1))
    curve = " ".join(f"{100 * accuracy:.0f}" for accuracy in run.accuracies)
    print(f"{name}: {curve} in {run.seconds:.0f} s, {run.mixed:.0%} of groups mixed", flush=True)
    return run


def configuration(folder: Path, method: str, *, seed: int, args: argparse.Namespace) -> Config:
    """The demo's, with fewer completions a step and a constant learning rate."""
    raw: dict[str, Any] = demo_config(folder, seed=seed).model_dump(mode="json")
    data, resample = METHODS[method]
    raw["data"] |= {"path": f"{folder}-data/train.jsonl", **data}
    raw["rollout"] |= {"num_generations": GENERATIONS, "resample": resample}
    raw["train"] |= {"steps": args.steps, "prompts_per_step": args.prompts_per_step, "lr_schedule": "constant"}
    raw["train"]["learning_rate"] = args.learning_rate
    raw["eval"] |= {"path": f"{folder}-data/heldout.jsonl", "every": max(1, EVALUATE_EVERY // args.prompts_per_step)}
    raw["run"] |= {"checkpoint_every": 0, "show_completions_every": 0, "completions_every": 0, "record_tokens": False}
    return config_from_dict(raw)


def write_problems(config: Config, problems: str, count: int, *, seed: int) -> None:
    """Write training and held-out problems."""
    folder = Path(str(config.data.path)).parent
    folder.mkdir(parents=True, exist_ok=True)
    word_problems.write_jsonl(folder / "heldout.jsonl", word_problems.generate(0, HELDOUT, "heldout"))
    rows = word_problems.generate(seed, count)
    if problems == "mixture":
        rng = random.Random(seed)
        easy = easiest(config, count // 4, seed=seed)
        rows = [*rows[: count - 2 * len(easy)], *easy, *(too_hard(rng) for _ in easy)]
    word_problems.write_jsonl(folder / "train.jsonl", rows)


def too_hard(rng: random.Random) -> Problem:
    """A problem in the words of the demo with larger numbers than the base model has seen."""
    name, things = rng.choice(word_problems.NAMES), rng.choice(word_problems.THINGS)
    total, lost, found = rng.randint(1000, 3000), rng.randint(200, 900), rng.randint(200, 900)
    calculation = (f"{total}-{lost}={total - lost}", f"{total - lost}+{found}={total - lost + found}")
    question = f"{name} has {total} {things}. A goat eats {lost}. {name} finds {found}. "
    return Problem(f"{question}How many {things} does {name} have now?", total - lost + found, calculation)


def easiest(config: Config, count: int, *, seed: int) -> list[Problem]:
    """Problems of a larger number that the base model solves most often; kept in a file, as this takes a minute."""
    file = Path(str(config.data.path)).parent.parent / f"pool-seed{seed}-{count}.jsonl"
    pool = word_problems.generate(1000 + seed, EASY_POOL * count)
    if not file.exists():
        word_problems.write_jsonl(file, pool)
        add_pass_rates(config, file)
    rates = [json.loads(line)["pass_rate"] for line in file.read_text().splitlines()]
    best = sorted(range(len(pool)), key=lambda n: -rates[n])[:count]
    print(
        f"too easy: solved in {statistics.mean(rates[n] for n in best):.0%}, all {statistics.mean(rates):.0%}",
        flush=True,
    )
    return [pool[n] for n in best]


def add_pass_rates(config: Config, file: Path) -> None:
    """Add the column with the base model's share of right answers to a file of problems."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    unknown = config_from_dict(config.model_dump(mode="json") | {"data": {"path": str(file), "prompt": "question"}})
    for group in sample_rows(unknown, rows=len(rows), generations=GENERATIONS).groups:
        rows[group.prompt.id]["pass_rate"] = float(group.reward_parts["right"].mean())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(runs: list[Run], target: float) -> str:
    """One line for each set and method: median of the completions needed, and range over seeds."""
    lines = []
    usual = {}
    for key in dict.fromkeys((run.problems, run.method) for run in runs):
        of_key = [run for run in runs if (run.problems, run.method) == key]
        needed = [run.completions_until(target) for run in of_key]
        reached = sorted(n for n in needed if n is not None)
        median = statistics.median(n if n is not None else float("inf") for n in needed)
        if key[1] == "uniform":
            usual[key[0]] = median
        times = usual.get(key[0], float("nan")) / median
        lines.append(
            [
                *key,
                f"{median:,.0f}",
                f"{reached[0]:,.0f} to {reached[-1]:,.0f}" if reached else "-",
                f"{times:.2f}",
                f"{len(reached)} of {len(needed)}",
                f"{statistics.mean(run.mixed for run in of_key):.0%}",
            ]
        )
    header = [f"completions until {target:.0%}", "lowest and highest seed", "fewer than uniform, times"]
    return markdown(["problems", "sampling", *header, "seeds that reach it", "mixed groups"], lines)


if __name__ == "__main__":
    main()
