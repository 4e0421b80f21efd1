"""Runs on a GPU: the demo's task with either engine, and what a vLLM server does between steps.

With a server the parts of a run are called one by one: publish, sample, sleep, wake, publish other weights, sample.
What the server samples by must be the trainer's weights (law 5), so both compute the logprobs of the same completions.
The weights change by more than the tolerance in between, so that a server with old weights is seen.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohort.algorithms import build_sequences
from cohort.config import VllmRolloutConfig, config_from_dict
from cohort.demo.run import demo_config, write_data
from cohort.display import Display
from cohort.launch import train
from cohort.plan.defaults import server_memory_utilization
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import Prompt, RolloutGroup
from cohort.rollout import RolloutCollector, SamplingParams
from cohort.rollout.engines.vllm.server import check_vllm
from cohort.trainer.worker import Worker, run_forward_only
from comparisons import Check, attempt
from harness import SkippedError
from vllm_servers import GENERATIONS, SHAPES, key, started

STEPS = 8  # of the short run
MOST_WRONG = 0.5  # of the held-out problems after it; before, 80 % are
ROUNDED, EXACT = 0.05, 1e-3  # nats: of logprobs in the mean, with and without products in bfloat16
MOST_KEPT = 0.3  # by a server that sleeps, of the memory that it may take
NEW_WEIGHTS = 1.5  # times the old ones: a server that kept the old ones is seen


def short_run(device: torch.device, engine: str) -> dict[str, Any]:
    """A few steps of the demo's task: it learns, and sampler and trainer agree."""
    measured = run_demo(device, engine, steps=STEPS)
    limit = ROUNDED if device.type == "cuda" else EXACT
    checks = [
        Check(name=f"{STEPS} steps, {engine}: wrong answers after", error=1 - measured["after"], limit=MOST_WRONG),
        Check(name=f"{STEPS} steps, {engine}: sampler and trainer", error=measured["logp_difference"], limit=limit),
    ]
    return {"checks": [check.row() for check in checks], "measured": measured}


def run_demo(device: torch.device, engine: str, *, steps: int) -> dict[str, Any]:
    """The demo's task: accuracy before and after, and medians of its metrics.

    Args:
        device: of the run.
        engine: that samples.
        steps: of the run.
    """
    if engine == "vllm":
        find_vllm()
    with tempfile.TemporaryDirectory() as folder:
        raw = demo_config(Path(folder) / "run", seed=0, engine=engine).model_dump(mode="json")
        write_data(Path(folder) / "run", config_from_dict(raw), seed=0)
        raw["train"]["steps"] = steps
        raw["eval"]["every"] = 0
        raw["hardware"]["device"] = device.type
        raw["run"] |= {"checkpoint_every": 0, "show_completions_every": 0}
        result = train(config_from_dict(raw), display=Display())
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]

    def median(name: str) -> float | None:
        values = [line[name] for line in trained if line.get(name) is not None]
        return statistics.median(values) if values else None

    names = ("step_time", "time/rollout_s", "time/train_s", "time/publish_s", "rollout/tokens_per_second", "mfu")
    return {
        "steps": len(trained),
        "before": result.summary["accuracy_before"],
        "after": result.summary["accuracy_after"],
        "seconds": result.summary["seconds"],
        "logp_difference": median("sampling/sampling_logp_difference/mean"),
        "peak_bytes": max(line["memory/peak_bytes"] for line in trained),
        **{name: median(name) for name in names},
    }


def find_vllm() -> str:
    """The Python that has vLLM, and whose version is one that Cohort knows.

    Raises:
        SkippedError: there is none, and nobody has named one.
        UserError: the one that was named has none.
    """
    python = os.environ.get("COHORT_VLLM_PYTHON")
    if not python and importlib.util.find_spec("vllm") is None:
        raise SkippedError("vLLM is not installed here, and COHORT_VLLM_PYTHON names no Python that has it")
    check_vllm(python or sys.executable)
    return python or sys.executable


def servers(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Publish, sample, sleep, wake and publish other weights."""
    find_vllm()
    checks: list[Check] = []
    start = time.perf_counter()
    shape = SHAPES["3M" if tiny else "45M"]
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), shape, device.type, max_tokens=64) as parts:
        collector, workers, prompts = parts
        _sample(collector, workers, prompts[:1], 0)  # waits until the server is up, and warms it up
        weights = sum(p.numel() for p in workers.local.policy.model.parameters())
        measured = {"start_s": time.perf_counter() - start, "published_weights": float(weights)}
        groups: list[RolloutGroup] = []
        for version in (1, 2):
            if groups:
                checks.append(_change_weights(workers, groups))
            groups, found = _sample(collector, workers, prompts, version)
            measured |= {f"{name}, weights {version}": value for name, value in found.items()}
            checks += attempt(
                f"vLLM, weights {version}",
                {"server and trainer": _tolerance(workers)},
                lambda groups=groups: {"server and trainer": _difference(workers, groups)},
            )
            checks.append(_slept(device, found["freed_bytes"], version))
    return {"checks": [check.row() for check in checks], "measured": measured}


def _sample(
    collector: RolloutCollector, workers: WorkerGroup[Worker], prompts: list[Prompt], version: int
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Publish the weights and sample with them: the groups, times, and the memory that the server then gives back."""
    workers.call(Worker.empty_cache)
    chosen = SamplingParams(num_generations=GENERATIONS, max_completion_tokens=64, temperature=1.0)
    start = time.perf_counter()
    collector.update_weights(policy_version=version)  # wakes a server that sleeps
    published = time.perf_counter()
    tasks = collector.submit(prompts, chosen, key(version))
    free = _free_bytes(workers.local.policy.device)
    collector.wait(tasks, count=len(tasks))  # on a GPU it lets the server sleep
    sampled = time.perf_counter()
    groups = [task.result() for task in tasks]
    tokens = sum(len(c.sampled_token_ids) for g in groups for c in g.trajectories)
    return groups, {
        "publish_s": published - start,
        "tokens_per_s": tokens / (sampled - published),
        "freed_bytes": float(_free_bytes(workers.local.policy.device) - free),
    }


def _change_weights(workers: WorkerGroup[Worker], groups: list[RolloutGroup]) -> Check:
    """Change them all by so much that samples of the old ones are told from samples of the new ones."""
    with torch.no_grad():
        for parameter in workers.local.policy.model.parameters():
            parameter.mul_(NEW_WEIGHTS)
    seen = _difference(workers, groups) / _tolerance(workers)
    return Check(name="vLLM: old weights would be seen, tolerance / difference", error=1 / seen, limit=0.5)


def _slept(device: torch.device, freed_bytes: float, version: int) -> Check:
    name = f"vLLM, after weights {version}: memory kept in sleep, of what it may take"
    if device.type == "cpu":
        return Check(name=name, error=None, limit=MOST_KEPT, note="needs a GPU", left_out=True)
    taken = (
        server_memory_utilization(VllmRolloutConfig(engine="vllm"), shared=True) * torch.cuda.mem_get_info(device)[1]
    )
    return Check(name=name, error=1 - freed_bytes / taken, limit=MOST_KEPT)


def _free_bytes(device: torch.device) -> int:
    """Of the GPU, over all processes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _tolerance(workers: WorkerGroup[Worker]) -> float:
    policy = workers.local.policy
    return ROUNDED if torch.bfloat16 in (policy.dtype, policy.compute_dtype) else EXACT


def _difference(workers: WorkerGroup[Worker], groups: list[RolloutGroup]) -> float:
    """Between the sampler's logprobs and those of the trainer's weights, in the mean over tokens."""
    sequences = build_sequences(groups)
    ours = run_forward_only(workers, sequences, {"logprobs"}).logprobs
    return float(np.concatenate([np.abs(ours[s.index] - s.sampling_logprobs) for s in sequences]).mean())
