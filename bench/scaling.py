"""Scaling of the training phase over processes, and what packing and communication cost of a step.

    python bench/scaling.py [--repeats 5] [--processes 1 2] [--quick]

The demo's model and task, one thread per process, completions of 48 tokens that all have an advantage, so that all are
computed. Strong scaling: the same 256 completions on more processes. Weak scaling: 256 completions per process.
"Unconnected" are as many processes at the same time that know nothing of each other and compute the same share each:
what they lose, the machine loses (shared caches, memory and cores). All in turn, `--repeats` times over; of each the
best median of a step, since what other work takes away is none of ours.
"""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cohort.algorithms import assign_advantages, build_sequences
from cohort.config import Config, load_config, to_yaml
from cohort.data import PromptStream
from cohort.demo.run import demo_config, write_data
from cohort.ranks.collectives import Ranks
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ForwardOnlyOutputs
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.inputs import build_inputs
from cohort.trainer.worker import Worker, pack_batches, sample

PROMPTS, STEPS = 16, 6
PHASES = ("rollout", "pack", "train", "communication", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", nargs=2, metavar=("CONFIG", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.rank:
        run_rank(load_config(args.rank[0]), Path(args.rank[1]))
        return
    several = [n for n in args.processes if n > 1]
    cases = [("one", 1, PROMPTS)]
    cases += [
        (kind, n, prompts)
        for n in several
        for kind, prompts in (("strong", PROMPTS), ("unconnected", PROMPTS), ("weak", PROMPTS * n))
    ]
    if args.quick:
        args.repeats, cases = 1, [("strong", 2, 1)]
    seconds: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for kind, processes, prompts in cases:
                place = Path(folder) / f"{kind}-{processes}-{repeat}"
                seconds.setdefault((kind, processes), []).append(measure(place, kind, processes, prompts))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print("| scaling | processes | completions | train, s | efficiency | rollout, s | packing | communication |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = min((r["train"] for r in seconds.get(("one", 1), [])), default=math.nan)
    for kind, processes, prompts in cases:
        m = {phase: min(r[phase] for r in seconds[kind, processes]) for phase in PHASES}
        efficiency = base * (prompts / PROMPTS) / (m["train"] * processes)
        share = "-" if math.isnan(efficiency) else f"{efficiency:.0%}"
        print(
            f"| {kind} | {processes} | {prompts * 16} | {m['train']:.3f} | {share} | {m['rollout']:.3f} | "
            f"{m['pack'] / m['step']:.1%} | {m['communication'] / m['step']:.1%} |"
        )


def measure(folder: Path, kind: str, processes: int, prompts: int) -> dict[str, float]:
    """Median seconds of each phase of a step; of unconnected processes those of the slowest."""
    groups = [processes] if kind != "unconnected" else [1] * processes
    started = [start(folder / str(n), size, prompts // len(groups)) for n, size in enumerate(groups)]
    for ranks, _ in started:
        for rank, process in enumerate(ranks):
            if process.wait() != 0:
                raise SystemExit(f"rank {rank} failed with exit code {process.returncode}")
    results = [json.loads(out.read_text(encoding="utf-8")) for _, out in started]
    return {phase: max(result[phase] for result in results) for phase in PHASES}


def start(folder: Path, processes: int, prompts: int) -> tuple[list[subprocess.Popen[bytes]], Path]:
    """The processes of one run, and the file that rank 0 will write."""
    config = demo_config(folder, seed=0)
    train = config.train.model_copy(update={"prompts_per_step": prompts, "micro_batch_tokens": 16384})
    config = config.model_copy(update={"train": train, "eval": None})
    write_data(folder, config, seed=0)
    file, out = folder / "bench.yaml", folder / "out.json"
    file.write_text(to_yaml(config), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, __file__, "--rank", str(file), str(out)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]
    return ranks, out


def run_rank(config: Config, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(backend="gloo", timeout_s=120, command_timeout_s=120)
    inputs = build_inputs(config) if ranks.is_rank0 else None
    spec = WorkerSpec(
        folder=Path(config.run.dir),
        num_steps=STEPS,
        checkpoint=None,
        micro_batch_tokens=config.train.micro_batch_tokens,
        longest_sequence_tokens=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
    )
    tokenizer = inputs.tokenizer if inputs else None
    worker = build_worker(config, ranks, spec, device=torch.device("cpu"), tokenizer=tokenizer)
    endless = Sampler(worker.policy, end_token_ids=frozenset({-1}), max_num_seqs=config.rollout.max_num_seqs)
    workers = WorkerGroup(replace(worker, sampler=endless), ranks)
    if inputs is None:
        workers.serve()
    else:
        steps = time_steps(config, inputs, workers, ranks)[1:]  # the first one warms up
        out.write_text(json.dumps({p: statistics.median(s[p] for s in steps) for p in PHASES}), encoding="utf-8")
        ranks.end_commands()
    leave_ranks()


def time_steps(config: Config, inputs, workers, ranks: Ranks) -> list[dict[str, float]]:
    data = PromptStream(inputs.prompts, seed=0, shuffle=True)
    collector = RolloutCollector(LocalEngine(partial(sample, workers)), inputs.tokenizer)
    sampling = SamplingParams(num_generations=16, max_completion_tokens=48, temperature=1.0)
    rng = np.random.default_rng(0)
    algorithm = workers.local.algorithm
    coefficients = algorithm.coefficients(algorithm.initial_coefficients)
    steps = []
    for step in range(STEPS):
        workers.communication_seconds()
        times = [time.perf_counter()]
        key = StepKey(purpose="train", seed=0, step=step)
        groups = collector.collect(data.take(config.train.prompts_per_step), sampling, key)
        times.append(time.perf_counter())
        scored = inputs.rewards.score(groups)
        scored = [replace(group, rewards=rng.random(16)) for group in scored]
        sequences = assign_advantages(
            scored,
            algorithm,
            build_sequences(scored),
            ForwardOnlyOutputs(),
            reward_weights=inputs.rewards.weights,
            coefficients=coefficients,
        )
        times.append(time.perf_counter())
        batches = pack_batches(workers.local.engine, sequences)
        times.append(time.perf_counter())
        workers.scatter(Worker.forward_backward, batches, "policy", coefficients)
        workers.call(Worker.optim_step, "policy")
        times.append(time.perf_counter())
        rollout, _, pack, train = np.diff(times).tolist()
        step_s = times[-1] - times[0]
        steps.append(
            {
                "rollout": rollout,
                "pack": pack,
                "train": train,
                "communication": workers.communication_seconds(),
                "step": step_s,
            }
        )
    return steps


if __name__ == "__main__":
    main()
