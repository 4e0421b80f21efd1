"""A synthetic run folder of any size, for the benchmark of the page: random text, tokens and curves."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cohort.config import config_from_dict, to_yaml
from cohort.demo.run import demo_config

GENERATIONS, TEMPLATES, EVAL_EVERY, HELDOUT = 10, 16, 100, 256
NEEDLE, NEEDLE_STEP = "quokka", 100
OTHER_METRICS = """
frac_unscored completions/clipped_ratio completions/broken completions/min_length completions/max_length
rollout/staleness_mean rollout/staleness_max rollout/stale_dropped rollout/carried_over rollout/dropped_groups
clip_ratio/high_mean clip_ratio/low_mean clip_ratio/region_mean sampling/sampling_logp_difference/mean
sampling/sampling_logp_difference/max loss grad_norm time/rollout_s time/reward_s time/forward_only_s time/pack_s
time/train_s time/optim_s time/publish_s step_time num_tokens tokens_per_second rollout/tokens_per_second
completions/trained_ratio padding_fraction micro_batches micro_batch_tokens out_of_memory processes
memory/rollout_peak_bytes memory/train_peak_bytes memory/optim_peak_bytes memory/peak_bytes
model_tflops_per_second prompt_tokens_saved rewards/right/frac_zero_std rewards/right/length_correlation
"""
ALWAYS_0 = ("frac_unscored", "out_of_memory", "completions/broken", "rollout/stale_dropped", "rollout/dropped_groups")


def write_run(folder: Path, steps: int, rows: int) -> None:
    """Write a run folder of `steps` steps with `rows` completions each."""
    (folder / "completions").mkdir(parents=True)
    demo = demo_config(folder, seed=0).model_dump(mode="json")
    sections = {name: demo[name] for name in ("model", "data", "rewards", "run")}
    sections["train"] = {**demo["train"], "steps": steps, "prompts_per_step": rows // GENERATIONS}
    sections["rollout"] = {"num_generations": GENERATIONS}
    sections["eval"] = {"path": str(folder / "heldout.jsonl"), "every": EVAL_EVERY}
    written = config_from_dict(sections)
    (folder / "config.yaml").write_text(to_yaml(written), encoding="utf-8")
    rng = np.random.default_rng(0)
    templates = [completions(rng, rows) for _ in range(TEMPLATES)]
    heldout = completions(rng, HELDOUT).drop_columns(["advantage"])
    for step in range(1, steps + 1):
        table = at_step(templates[step % TEMPLATES], step, rng)
        if step == min(NEEDLE_STEP, steps):
            texts = table.column("completion").to_pylist()
            texts[rows // 2] += f" {NEEDLE}"
            table = table.set_column(table.schema.get_field_index("completion"), "completion", pa.array(texts))
        pq.write_table(table, folder / f"completions/step-{step:06d}.parquet", compression="zstd")
        if step % EVAL_EVERY == 0:
            evaluation = at_step(heldout, step, rng)
            pq.write_table(evaluation, folder / f"completions/eval-{step:06d}.parquet", compression="zstd")
    write_metrics(folder, steps, rng)


def completions(rng: np.random.Generator, rows: int) -> pa.Table:
    """Completions of 20 to 400 tokens with the columns of a real file."""
    words = np.array(["so", "the", "answer", "is", "12", "plus", "then", "we", "have", "x", "=", "7", "check", "\n"])
    lengths = rng.integers(20, 400, rows)
    tokens = [rng.integers(5, 400, n).astype(np.int32) for n in lengths]
    logprobs = [-rng.exponential(0.3, n).astype(np.float32) for n in lengths]
    prompts = np.repeat(np.arange((rows + GENERATIONS - 1) // GENERATIONS), GENERATIONS)[:rows]
    reward = rng.integers(0, 2, rows).astype(float)
    finish_reasons = rng.choice(["stop", "length"], rows, p=[0.9, 0.1])
    return pa.table(
        {
            "step": pa.array(np.zeros(rows, np.int64)),
            "group": pa.array(prompts),
            "prompt_id": pa.array(prompts),
            "prompt": [f"Zoe has {p} marbles and finds {p % 7}. How many marbles does Zoe have now?" for p in prompts],
            "prompt_is_chat": np.zeros(rows, bool),
            "answer": [str(p + p % 7) for p in prompts],
            "completion": [" ".join(rng.choice(words, n // 2)) for n in lengths],
            "prompt_token_ids": pa.array([rng.integers(5, 400, 26).astype(np.int32) for _ in range(rows)]),
            "completion_token_ids": pa.array(tokens),
            "sampling_logprobs": pa.array(logprobs),
            "num_tokens": pa.array(lengths),
            "end": np.where(finish_reasons == "stop", "answer", "length"),
            "finish_reason": finish_reasons,
            "policy_version": pa.array(np.zeros(rows, np.int64)),
            "reward": reward,
            "rewards/right": reward,
            "advantage": rng.normal(size=rows),
        }
    )


def at_step(template: pa.Table, step: int, rng: np.random.Generator) -> pa.Table:
    """The template with the step's number and rewards of its own."""
    reward = pa.array(rng.integers(0, 2, template.num_rows).astype(float))
    new = {"step": pa.array(np.full(template.num_rows, step)), "reward": reward, "rewards/right": reward}
    new["policy_version"] = pa.array(np.full(template.num_rows, step - 1))
    for name, values in new.items():
        template = template.set_column(template.schema.get_field_index(name), name, values)
    return template


def write_metrics(folder: Path, steps: int, rng: np.random.Generator) -> None:
    """Write metrics.jsonl with the names of a real step, and evaluations."""
    progress = np.linspace(0, 1, steps)
    curves = {
        "reward": 0.2 + 0.6 * progress,
        "reward_std": np.full(steps, 0.4),
        "frac_reward_zero_std": np.full(steps, 0.2),
        "rewards/right/mean": 0.2 + 0.6 * progress,
        "rewards/right/std": np.full(steps, 0.45),
        "entropy": 0.5 - 0.3 * progress,
        "kl": 0.1 * progress,
        "completions/mean_length": 100 + 100 * progress,
        "learning_rate": np.full(steps, 1e-6),
    }
    values = {name: curve + 0.02 * rng.normal(size=steps) for name, curve in curves.items()}
    values |= {name: rng.random(steps) for name in OTHER_METRICS.split()}
    values |= {name: np.zeros(steps) for name in ALWAYS_0}
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for i in range(steps):
            row = {"step": i + 1, "kind": "train", "timestamp": 1.7e9 + i}
            file.write(json.dumps(row | {name: float(column[i]) for name, column in values.items()}) + "\n")
            if (i + 1) % EVAL_EVERY == 0:
                accuracy = round(HELDOUT * float(0.2 + 0.6 * progress[i])) / HELDOUT
                file.write(json.dumps({"step": i + 1, "kind": "eval", "eval/accuracy": accuracy}) + "\n")
