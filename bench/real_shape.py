"""Qwen2.5-0.5B's true shape on a CPU, by Cohort and by TRL's GRPOTrainer in turn: seconds per step and peak memory.

    python bench/real_shape.py [--steps 2] [--rounds 1] [--methods cohort trl] [--quick]

494 million float32 weights and 151,936 words, both random: what is measured is work, not learning. Prompts and
completions are short, so that the size of the model and its vocabulary decide: 4 prompts of 32 tokens, 4 completions of
32 each, one update per step. Every trainer runs in a process of its own with one thread, in turn, `rounds` times. TRL
runs with its defaults and once more without gradient checkpointing; Cohort with its defaults. The first step of each
is not counted. Where other programs run, the seconds of the processor say more than those of a clock. Needs the extra
`bench`.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohort.metrics.resources import resident
from harness import ModelShape, do_job, machine, markdown, run_apart, write_model

QWEN25_05B = ModelShape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocab=151_936, is_qwen2=True)
SMALL = ModelShape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128, vocab=512, is_qwen2=True)
METHODS = ["cohort", "trl", "trl-no-checkpointing"]
PROMPTS, GENERATIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 4, 32, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="that count")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(work, args.job)
        return
    shape, steps = (SMALL, 1) if args.quick else (QWEN25_05B, args.steps)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder) / "model")
        write_tokenizer(shape.vocab, Path(folder) / "model")
        for _, name in itertools.product(range(args.rounds), args.methods):
            found[name].append(
                run_apart(__file__, {"name": name, "folder": folder, "steps": steps, "vocab": shape.vocab})
            )
            print(name, json.dumps(found[name][-1]), file=sys.stderr)
    print(f"{machine('trl')}; one thread; {PROMPTS} prompts of {PROMPT_TOKENS} tokens x {GENERATIONS} completions of "
          f"{COMPLETION_TOKENS}; steps that count: {steps} x {args.rounds}")  # fmt: skip
    print(table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """One row per trainer, with ratios to Cohort; one that could not run says why."""
    means = {}
    for name, rounds in found.items():
        if all("skipped" not in result for result in rounds):
            seconds, wall = (statistics.mean(s for r in rounds for s in r[key]) for key in ("seconds", "wall_s"))
            means[name] = (seconds, wall, max(r["peak_bytes"] for r in rounds) / 1e9)
    base, rows = means.get("cohort", (math.nan,) * 3), []
    for name, rounds in found.items():
        if name not in means:
            rows.append([f"{name} ({next(r['skipped'] for r in rounds if 'skipped' in r)})", *["-"] * 5])
            continue
        seconds, wall, peak = means[name]
        ratios = [f"{seconds / base[0]:.2f}x", f"{peak / base[2]:.2f}x"]
        rows.append([name, f"{seconds:.1f}", f"{wall:.1f}", f"{peak:.2f}", *ratios])
    return markdown(["", "s of CPU time per step", "s per step", "peak GB", "time", "memory"], rows)


def write_tokenizer(vocab: int, folder: Path) -> None:
    """A token per byte, and the rest of the vocabulary in words that no prompt has."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"w{n}" for n in range(len(names), vocab)]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train; the seconds of every step but the first, and the peak memory of the process."""
    letters = np.random.default_rng(0).integers(97, 123, (PROMPTS * (job["steps"] + 1), PROMPT_TOKENS), dtype=np.uint8)
    prompts = [row.tobytes().decode() for row in letters]
    clock = Clock()
    (train_with_cohort if job["name"] == "cohort" else train_with_trl)(job, prompts, clock)
    assert len(clock.steps) == job["steps"] + 1, clock.steps
    return {
        "seconds": [seconds for seconds, _ in clock.steps[1:]],
        "wall_s": [wall for _, wall in clock.steps[1:]],
        "peak_bytes": clock.peak_bytes,
    }


class Clock:
    """Seconds and memory of steps. A step ends where the next begins; the first has what comes before it as well."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []  # seconds of the processor, and of a clock
        self.peak_bytes = 0
        self._last = (time.process_time(), time.perf_counter())

    def step_ended(self, *, peak_bytes: int) -> None:
        """Note a step, and the peak so far."""
        now = (time.process_time(), time.perf_counter())
        self.steps.append((now[0] - self._last[0], now[1] - self._last[1]))
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self._last = now


def mean_word(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions: the mean of the words' numbers."""
    numbers = [[int(number) for number in re.findall("[0-9]+", completion)] for completion in completions]
    return [sum(n) / (1e5 * max(1, len(n))) for n in numbers]


def train_with_cohort(job: dict[str, Any], prompts: list[str], clock: Clock) -> None:
    import cohort

    trainer = cohort.Trainer(
        {"path": f"{job['folder']}/model", "compute_dtype": "float32"},
        {
            "path": [{"prompt": prompt} for prompt in prompts],
            "prompt": "prompt",
            "apply_chat_template": False,
            "shuffle": False,
        },
        [mean_word],
        rollout={
            "engine": "local",
            "num_generations": GENERATIONS,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_completion_tokens": COMPLETION_TOKENS,
        },
        train={"steps": job["steps"] + 1, "prompts_per_step": PROMPTS, "learning_rate": 1e-6},
        hardware={"processes": 1},
        run={"dir": tempfile.mkdtemp(dir=job["folder"]), "checkpoint_every": 0},
    )
    for step in trainer:
        clock.step_ended(peak_bytes=int(step.metrics["memory/peak_bytes"]))


def train_with_trl(job: dict[str, Any], prompts: list[str], clock: Clock) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Stopwatch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step_ended(peak_bytes=resident()["VmHWM"])

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=job["folder"]),
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=COMPLETION_TOKENS,
        max_steps=job["steps"] + 1,
        learning_rate=1e-6,
        loss_type="grpo",
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=job["name"] == "trl",  # its default is True
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
    )
    GRPOTrainer(
        model=f"{job['folder']}/model",
        reward_funcs=mean_word,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Stopwatch()],
    ).train()


if __name__ == "__main__":
    main()
