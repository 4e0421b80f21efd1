"""Rollouts by vLLM: tokens per second, the time of handing over weights, and how long training waits for completions.

    python bench/vllm_servers.py [--device cpu|cuda] [--repeats 5] [--parts sampling publish staleness] [--quick]

Needs a Python that has vLLM (`make vllm-env`, or COHORT_VLLM_PYTHON). On CPU server and trainer have one thread each.

- sampling: the same random prompts on the server, on the local engine and with transformers' `generate`, 16 prompts x 8
  completions; in turn, in one process.
- publish: weights of random models from trainer to server, pause and commit included.
- staleness: the demo's task with `rollout.max_staleness` 0, 1 and 4. Completions are held back so that sampling takes
  as long as training.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import cohort
from cohort.config import Config, config_from_dict
from cohort.demo import run as demo
from cohort.demo.tasks import WORDS
from cohort.models import end_token_ids, load_tokenizer
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import Prompt
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey
from cohort.rollout.engines.servers import server_engine as engine_module
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.inputs import build_inputs
from cohort.trainer.setup import open_engine, rank_device
from cohort.trainer.worker import TrainingWorkers
from harness import ModelShape, machine, markdown, write_model

SHAPES = {
    "3M": ModelShape(hidden=256, layers=4, intermediate=768, vocab=489),
    "45M": ModelShape(hidden=512, layers=8, intermediate=1536, vocab=32_768),
    "230M": ModelShape(hidden=1024, layers=12, intermediate=3072, vocab=65_536),
}
PROMPTS, GENERATIONS, PROMPT_TOKENS = 16, 8, 128
STEPS, UPDATES = 12, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parts = {"sampling": sampling, "publish": publishing, "staleness": staleness}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.parts = 1, ["publish"]
        del SHAPES["45M"], SHAPES["230M"]
    print(machine(), flush=True)
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[part](Path(folder), args.device, args.repeats)


def sampling(folder: Path, device: str, repeats: int) -> None:
    """Tokens per second of three engines."""
    rows = []
    for limit in (64, 256):
        with started(folder / f"{limit}", SHAPES["3M"], device, max_tokens=limit) as (collector, workers, prompts):
            ends = end_token_ids(workers.local.policy, workers.local.tokenizer)
            sampler = Sampler(workers.local.policy, end_token_ids=ends, max_num_seqs=PROMPTS * GENERATIONS)
            local = RolloutCollector(LocalEngine(sampler.sample), workers.local.tokenizer)
            chosen = SamplingParams(num_generations=GENERATIONS, max_completion_tokens=limit, temperature=1.0)
            ways: dict[str, Callable[[int], int]] = {
                "vLLM server": partial(by_engine, collector, prompts, chosen),
                "local engine": partial(by_engine, local, prompts, chosen),
                "transformers": partial(by_transformers, workers.local.policy.model, prompts, limit, ends),
            }
            speeds: dict[str, list[float]] = {name: [] for name in ways}
            for repeat in range(repeats + 1):
                for name, sample in ways.items():
                    start = time.perf_counter()
                    speeds[name].append(sample(repeat) / (time.perf_counter() - start))
            rows.append([str(limit), *(f"{statistics.median(s[1:]):,.0f}" for s in speeds.values())])  # 0 warms up
    print("\n### Tokens per second\n\n" + markdown(["longest completion", *ways], rows), flush=True)


def publishing(folder: Path, device: str, repeats: int) -> None:
    """Seconds of a publish."""
    rows = []
    for name, shape in SHAPES.items():
        with started(folder / name, shape, device, max_tokens=16) as (collector, workers, prompts):
            few = SamplingParams(num_generations=1, max_completion_tokens=4, temperature=1.0)
            collector.collect(prompts[:1], few, key(0))  # waits until the server has the first weights
            times = []
            for version in range(1, repeats + 2):
                start = time.perf_counter()
                collector.update_weights(policy_version=version)
                times.append(time.perf_counter() - start)
            weights = sum(p.numel() for p in workers.local.policy.model.parameters())
            megabytes = weights * workers.local.policy.dtype.itemsize / 1e6
            middle = statistics.median(times[1:])
            rows.append([f"{weights / 1e6:.0f}M", f"{megabytes:,.0f}", f"{middle:.2f}", f"{megabytes / middle:,.0f}"])
    print("\n### Handing over weights\n\n" + markdown(["weights", "MB", "seconds", "MB/s"], rows), flush=True)


def staleness(folder: Path, device: str, repeats: int) -> None:
    """How long a step waits for completions, with sampling that takes as long as training."""
    alone = medians(run(folder / "alone", device, max_staleness=0, hold_back_s=0.0))
    training_s = alone["step"] - alone["wait"]
    hold_back_s = max(0.0, training_s - alone["wait"])
    longer = max(training_s, alone["wait"] + hold_back_s)
    print(
        f"\ntraining {training_s:.2f} s, sampling {alone['wait']:.2f} s, held back for {hold_back_s:.2f} s", flush=True
    )
    rows = []
    for k in (0, 1, 4):
        lines = run(folder / f"k{k}", device, max_staleness=k, hold_back_s=hold_back_s)
        step = medians(lines)
        age = statistics.mean(line["rollout/staleness_mean"] for line in lines[k + 1 :])
        rows.append(
            [
                str(k),
                f"{step['step']:.2f}",
                f"{step['wait'] / step['step']:.0%}",
                f"{step['step'] / longer:.2f}",
                f"{age:.1f}",
            ]
        )
    header = ["max_staleness", "step, s", "of it waiting", "step / longer phase", "mean staleness"]
    print("\n### Sampling ahead\n\n" + markdown(header, rows), flush=True)


def medians(lines: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of a step and of its wait, without the steps in which the run gets going."""
    later = lines[5:]
    names = {"step": "step_time", "wait": "time/rollout_s"}
    return {name: statistics.median(line[metric] for line in later) for name, metric in names.items()}


def run(folder: Path, device: str, *, max_staleness: int, hold_back_s: float) -> list[dict[str, float]]:
    """The metrics of the steps of a run on the demo's problems."""
    raw = demo.demo_config(folder / "run", seed=0).model_dump(mode="json")
    demo.write_data(folder / "run", config_from_dict(raw), seed=0)
    raw["rollout"] |= {
        "engine": "vllm",
        "num_generations": GENERATIONS,
        "parity_every": 0,
        "max_staleness": max_staleness,
    }
    raw["train"] |= {"steps": STEPS, "updates_per_rollout": UPDATES}
    raw |= {"eval": None}
    raw["hardware"]["device"] = device
    raw["run"] |= {"checkpoint_every": 0, "keep_checkpoints": 3, "completions_every": 0, "record_tokens": False}
    with held_back(hold_back_s):
        result = cohort.train(raw)
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@contextmanager
def held_back(seconds: float) -> Iterator[None]:
    """Every answer of a server is handed over so much later."""
    answer = engine_module._answer_soon
    if seconds:
        engine_module._answer_soon = lambda *answered: threading.Timer(seconds, answer, answered).start()
    try:
        yield
    finally:
        engine_module._answer_soon = answer


@contextmanager
def started(
    folder: Path, shape: ModelShape, device: str, *, max_tokens: int
) -> Iterator[tuple[RolloutCollector, Any, list[Prompt]]]:
    """A server of a random model, the trainer's parts, and random prompts."""
    config = random_run(folder, shape, device, max_tokens)
    inputs = build_inputs(config)
    setup = open_engine(config, inputs)
    longest = inputs.longest_sequence_tokens
    spec = WorkerSpec(
        folder=folder, num_steps=1, checkpoint=None, micro_batch_tokens=8192, longest_sequence_tokens=longest
    )
    worker = build_worker(
        config, SINGLE_PROCESS, spec, device=rank_device(config, SINGLE_PROCESS), tokenizer=inputs.tokenizer
    )
    workers = WorkerGroup(worker, SINGLE_PROCESS)
    engine = setup.start(TrainingWorkers(workers), folder=folder, notify=lambda text: None).engine
    collector = RolloutCollector(engine, inputs.tokenizer)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=i, epoch=0, content="", token_ids=rng.integers(5, shape.vocab, PROMPT_TOKENS), columns={})
        for i in range(PROMPTS)
    ]
    try:
        yield collector, workers, prompts
    finally:
        collector.close()


def random_run(folder: Path, shape: ModelShape, device: str, max_tokens: int) -> Config:
    """The configuration of a run that is never run; its one prompt is as long as those that are measured."""
    write_model(shape, folder / "model")
    load_tokenizer(config_from_dict(minimal(str(WORDS.base_path), folder)).model).save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "1 " * PROMPT_TOKENS, "answer": "1"}) + "\n")
    raw = minimal(str(folder / "model"), folder)
    raw["rollout"] = {
        "engine": "vllm",
        "num_generations": GENERATIONS,
        "max_prompt_tokens": 4 * PROMPT_TOKENS,
        "max_completion_tokens": max_tokens,
    }
    raw["hardware"] = {"device": device}
    return config_from_dict(raw)


def minimal(model: str, folder: Path) -> dict[str, Any]:
    """A configuration with what it must have."""
    data = {"path": str(folder / "data.jsonl"), "apply_chat_template": False}
    return {"model": {"path": model}, "data": data, "rewards": [{"use": "exact"}]}


def by_engine(collector: RolloutCollector, prompts: list[Prompt], chosen: SamplingParams, step: int) -> int:
    return sum(len(c.sampled_token_ids) for g in collector.collect(prompts, chosen, key(step)) for c in g.trajectories)


def by_transformers(model: Any, prompts: list[Prompt], limit: int, ends: frozenset[int], step: int) -> int:
    torch.manual_seed(step)
    ids = torch.from_numpy(np.stack([prompt.token_ids for prompt in prompts])).to(model.device)
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": GENERATIONS}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        eos_token_id=sorted(ends),
        pad_token_id=0,
        **sampled,
    )
    rows = output[:, PROMPT_TOKENS:].tolist()
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows)


def key(step: int) -> StepKey:
    return StepKey(purpose="train", seed=0, step=step)


if __name__ == "__main__":
    main()
