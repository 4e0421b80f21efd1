"""Does each algorithm learn? The demo's task with every named algorithm: accuracy after equal numbers of samples.

    python bench/algorithms.py --out results [--seeds 0 1 2] [--steps 20] [--only grpo ppo] [--plot FILE.svg] | --quick

Each run samples 256 completions a step, as 16 prompts x 16 or, for algorithms that need no group, as 256 prompts x 1
too, and makes two updates on them, since clipping does nothing on the first; one where the loss has no ratio (rloo,
reinforce), which has no right to a second. Greedy accuracy on 256 held-out problems. Results are kept in `--out`, one
file a run; what is there is not run again. The plot needs matplotlib (extra `bench`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cohort.config import ALGORITHMS, Config, config_from_dict
from cohort.config.catalogue import POLICY_LOSSES, critic_algorithms, single_completion_algorithms
from cohort.demo.run import demo_config, write_data
from cohort.display import Display
from cohort.launch import train

SAMPLES, GROUP, UPDATES = 256, 16, 2  # completions a step, of a prompt, optimizer steps on them
EVALUATE_EVERY = 2  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, and how the accuracy went."""

    algorithm: str
    num_generations: int
    seed: int
    steps: int
    accuracies: Mapping[int, float]  # by step
    seconds: float

    @property
    def samples(self) -> list[int]:
        """Completions trained on at each evaluation."""
        return [step * SAMPLES for step in self.accuracies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep results here")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="write the curves here, as SVG or PNG")
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.only, args.seeds, args.steps = ["grpo"], [0], 1
    elif args.out is None:
        parser.error("--out: give a folder for the results")
    torch.set_num_threads(args.threads)
    wanted = [
        (name, size)
        for name in args.only
        for size in ([GROUP, 1] if name in single_completion_algorithms() else [GROUP])
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            kept_or_run(args.out or Path(folder), name, size, seed=seed, steps=args.steps)
            for seed in args.seeds
            for name, size in wanted
        ]
    print(table(runs))
    if args.plot:
        plot(runs, args.plot)


def kept_or_run(out: Path, name: str, num_generations: int, *, seed: int, steps: int) -> Run:
    """The run of that name, from its file where there is one."""
    file = out / f"{name}-{num_generations}-seed{seed}-{steps}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        return Run(**{**kept, "accuracies": {int(step): value for step, value in kept["accuracies"].items()}})
    folder = out / "runs" / file.stem
    config = configuration(folder, name, num_generations, seed=seed, steps=steps)
    write_data(folder, config, seed=seed)
    start = time.perf_counter()
    summary = train(config, display=Display()).summary
    run = Run(
        algorithm=name,
        num_generations=num_generations,
        seed=seed,
        steps=steps,
        accuracies={int(step): value for step, value in summary["accuracy_by_step"].items()},
        seconds=time.perf_counter() - start,
    )
    file.write_text(json.dumps(asdict(run), indent=1))
    print(f"{file.stem}: {curve_of(run)} in {run.seconds:.0f} s", flush=True)
    return run


def configuration(folder: Path, name: str, num_generations: int, *, seed: int, steps: int) -> Config:
    """The demo's, with another algorithm and as many samples."""
    raw: dict[str, Any] = demo_config(folder, seed=seed).model_dump(mode="json")
    raw["algorithm"] = {"name": name}
    raw["rollout"]["num_generations"] = num_generations
    raw["train"] |= {
        "steps": steps,
        "prompts_per_step": SAMPLES // num_generations,
        "updates_per_rollout": UPDATES if POLICY_LOSSES[ALGORITHMS[name].policy_loss].has_ratio else 1,
    }
    raw["critic"] = {"learning_rate": 1e-3} if name in critic_algorithms() else None
    raw["eval"]["every"] = EVALUATE_EVERY
    raw["run"] |= {"checkpoint_every": 0, "keep_checkpoints": 3, "show_completions_every": 0}
    raw["run"] |= {"completions_every": 0, "record_tokens": False}
    return config_from_dict(raw)


def curve_of(run: Run) -> str:
    """Accuracies in per cent, one after another."""
    return " ".join(f"{100 * a:.0f}" for a in run.accuracies.values())


def table(runs: list[Run]) -> str:
    """One line for each algorithm and group size: mean and range over seeds at the end, and halfway."""
    steps = list(runs[0].accuracies)
    halfway = len(steps) // 2
    lines = [
        f"| algorithm | generations | before | after {steps[halfway] * SAMPLES:,} samples | after "
        f"{runs[0].steps * SAMPLES:,} | lowest and highest seed | seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in dict.fromkeys((run.algorithm, run.num_generations) for run in runs):
        of_key = [run for run in runs if (run.algorithm, run.num_generations) == key]
        curves = [list(run.accuracies.values()) for run in of_key]
        first, middle, last = ([c[i] for c in curves] for i in (0, halfway, -1))
        lines.append(
            f"| {key[0]} | {key[1]} | {statistics.mean(first):.1%} | {statistics.mean(middle):.1%} | "
            f"{statistics.mean(last):.1%} | {min(last):.1%} to {max(last):.1%} | {len(of_key)} |"
        )
    return "\n".join(lines)


def plot(runs: list[Run], file: Path) -> None:
    """Mean accuracy over samples, and the range over seeds, a panel for each algorithm and group size."""
    import matplotlib

    matplotlib.use("svg" if file.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines
    from matplotlib import pyplot

    keys = list(dict.fromkeys((run.algorithm, run.num_generations) for run in runs))
    columns = 5
    figure, axes = pyplot.subplots(
        -(-len(keys) // columns), columns, figsize=(11, 1.7 * -(-len(keys) // columns)), sharex=True, sharey=True
    )
    for panel in axes.flat[len(keys) :]:
        panel.set_visible(False)
    for panel, (name, size) in zip(axes.flat, keys, strict=False):
        of_key = [run for run in runs if (run.algorithm, run.num_generations) == (name, size)]
        curves = list(zip(*(run.accuracies.values() for run in of_key), strict=True))
        panel.fill_between(of_key[0].samples, [min(c) for c in curves], [max(c) for c in curves], alpha=0.3, lw=0)
        panel.plot(of_key[0].samples, [statistics.mean(c) for c in curves])
        panel.set_title(name if size > 1 else f"{name}, one completion", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_ylim(0, 1)
    figure.supxlabel("completions", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
