"""The demo's work by Cohort and by TRL's GRPOTrainer: seconds per step, peak memory, accuracy reached.

    python bench/trl_demo.py [--steps 20] [--threads 2] [--seed 0] [--quick]

Same base model, same prompts in the same order, same number of prompts, generations, steps, learning rate, schedule,
clipping and optimizer. Each trainer runs in a process of its own, one after the other; all models are evaluated by the
same code. TRL runs with its defaults elsewhere, and once more without gradient checkpointing, which this size does not
need; `cohort.trl` runs TRL's script with another import. Products are in float32 on both sides. Where there is a GPU
both use it, and memory is that of its allocator. Needs the extra `bench`.
"""

import argparse
import itertools
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

METHODS = ["cohort", "trl", "trl-no-checkpointing", "cohort.trl"]
PROMPTS, GENERATIONS, LEARNING_RATE = 16, 16, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        result = train_with_cohort(args) if args.only == "cohort" else train_with_trl(args)
        result.setdefault("peak_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        (args.folder / f"{args.only}.json").write_text(json.dumps(result))
        return
    if args.quick:
        args.steps = 1
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run_apart(name, args, Path(folder)) for name in METHODS[: 2 if args.quick else 4]}
    print(
        f"\n{args.steps} steps of {PROMPTS} prompts x {GENERATIONS} generations, seed {args.seed}, {args.threads} "
        f"threads, {platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    )
    print(f"{'':22}{'s/step (median)':>17}{'s/step (mean)':>15}{'peak MB':>9}{'accuracy':>20}")
    for name, r in results.items():
        steps = r["step_seconds"]
        accuracy = f"{r['before']:.1%} -> {r['after']:.1%}" if "before" in r else "not measured"
        print(
            f"{name:22}{statistics.median(steps):17.3f}{statistics.mean(steps):15.3f}{r['peak_mb']:9.0f}{accuracy:>20}"
        )
    medians = {name: statistics.median(r["step_seconds"]) for name, r in results.items()}
    for name in list(medians)[1:]:
        print(f"Cohort's step is {medians[name] / medians['cohort']:.1f} times faster than that of {name} (medians)")


def run_apart(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One trainer in its own process, and both ends of its training evaluated in another."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, __file__, "--only", name, "--folder", str(folder)]
    command += ["--steps", str(args.steps), "--threads", str(args.threads), "--seed", str(args.seed)]
    log = folder / f"{name}.log"
    with log.open("w") as output:
        if subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode:
            raise SystemExit(f"{name} failed:\n{log.read_text()[-4000:]}")
    result = json.loads((folder / f"{name}.json").read_text())
    if args.quick:
        return result
    return result | {"before": accuracy(result["base"], folder), "after": accuracy(result["final"], folder)}


def make_data(folder: Path, seed: int) -> tuple[Path, Path]:
    from cohort.demo import word_problems

    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    word_problems.write_jsonl(train, word_problems.generate(seed, 2048, split="train"))
    word_problems.write_jsonl(heldout, word_problems.generate(0, 256, split="heldout"))
    return train, heldout


def cohort_config(args: argparse.Namespace) -> dict[str, Any]:
    from cohort.demo.tasks import ANSWER_PATTERN, WORDS

    train, _ = make_data(args.folder, args.seed)
    return {
        "model": {"path": str(WORDS.base_path), "compute_dtype": "float32"},
        "data": {"path": str(train), "prompt": "question", "shuffle": False},
        "rewards": [{"use": "exact", "args": {"pattern": ANSWER_PATTERN}}],
        "rollout": {
            "engine": "local",
            "num_generations": GENERATIONS,
            "max_completion_tokens": WORDS.rollout["max_completion_tokens"],
        },
        "hardware": {"processes": 1},
        "algorithm": {"name": "grpo"},
        "train": {
            "steps": args.steps,
            "prompts_per_step": PROMPTS,
            "learning_rate": LEARNING_RATE,
            "lr_schedule": "linear",
            "seed": args.seed,
        },
        "run": {"dir": str(args.folder / "cohort"), "checkpoint_every": 0, "completions_every": 0},
    }


def train_with_cohort(args: argparse.Namespace) -> dict[str, Any]:
    import cohort
    from cohort.display import Display

    config, times = cohort_config(args), []

    class Stopwatch(Display):
        def started(self, schedule, *, steps_done):
            times.append(time.perf_counter())

        def step(self, report):
            times.append(time.perf_counter())

    result = cohort.train(config, display=Stopwatch())
    rows = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        "base": config["model"]["path"],
        "final": str(result.final_dir),
        "step_seconds": differences(times),
        # measuring phases sets the system's own count back
        "peak_mb": max(row.get("memory/peak_bytes", 0) for row in rows) / 2**20,
    }


def train_with_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    if args.only == "cohort.trl":
        from cohort.trl import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer

    from cohort.demo.tasks import ANSWER_PATTERN, WORDS

    train, _ = make_data(args.folder, args.seed)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    times = []

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            times.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter())

    def right(completions, answer, **_):
        found = [re.findall(ANSWER_PATTERN, c[0]["content"].strip()) for c in completions]
        return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer, strict=True)]

    settings = GRPOConfig(
        output_dir=str(args.folder / args.only),
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=WORDS.rollout["max_completion_tokens"],
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        loss_type="grpo",
        beta=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=args.only == "trl",  # its default is True
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=str(WORDS.base_path), reward_funcs=right, args=settings, train_dataset=data, callbacks=[Stopwatch()]
    )
    trainer.train()
    final = args.folder / f"{args.only}-final"
    trainer.save_model(str(final))
    result = {"base": str(WORDS.base_path), "final": str(final), "step_seconds": differences(times)}
    return result | ({"peak_mb": torch.cuda.max_memory_allocated() / 2**20} if torch.cuda.is_available() else {})


def differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def accuracy(model: str, folder: Path) -> float:
    """Greedy accuracy on the held-out problems."""
    from cohort.demo.tasks import ANSWER_PATTERN

    command = [sys.executable, "-m", "cohort", "eval", model, "--data", str(folder / "heldout.jsonl")]
    command += ["--prompt", "question", "--reward", "exact", "--reward-args", json.dumps({"pattern": ANSWER_PATTERN})]
    out = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)["accuracy"]


if __name__ == "__main__":
    main()
