"""What each key that trades memory saves and costs: memory by part, counted, alongside the closed form; and time.

    python bench/modes.py [--size full|tiny] [--modes NAME ...] [--json FILE]

Each mode is a configuration that differs from the defaults in a few keys, built as a run builds it, with one thread for
each process. A step of two micro-batches for each process: 16 completions of 64 tokens after two shared prompts of 256,
hidden 512, 8 layers, a vocabulary of 8,192. With --json what is in the file is not measured again. Memory is
what PyTorch has given out on rank 0 when loading, backward and the update are done, and the most in between
(`allocations.py`); time is processor time of one more step, on a GPU all of it. A mode that fails has
a row that says why, and the others are measured. A new way to save memory is one more line in `MODES`.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from allocations import Counted, Phase, counting
from cohort.config import Config, config_from_dict
from cohort.learner import TrainEngine
from cohort.learner.loss import PerTokenLoss
from cohort.plan.hardware import Hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import read_shape
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.records import TrainSequence
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.setup import rank_device
from cohort.trainer.worker import Worker, pack_batches
from comparisons import first_line
from harness import ModelShape, do_job, machine, make_group, markdown, run_apart, write_model

# Name -> keys that differ from the defaults. `completions` is of the budget: that many and their prompt at a time.
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "half a group": {"completions": 1 / 2},
    "a quarter": {"completions": 1 / 4},
    "one completion": {"completions": 0},
    "selective": {"model.gradient_checkpointing": "selective"},
    "checkpointing": {"model.gradient_checkpointing": True},
    "both": {"completions": 0, "model.gradient_checkpointing": True},
    "gradients in forward": {"train.gradients_in_forward": True},
    "bfloat16 products": {"model.compute_dtype": "bfloat16"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "adamw_8bit": {"optim.name": "adamw_8bit"},
    "muon": {"optim.name": "muon"},
    "sgd with momentum": {"optim.name": "sgd", "optim.momentum": 0.9},
    "sgd": {"optim.name": "sgd"},
    "adafactor": {"optim.name": "adafactor"},
    "adapter": {"model.adapter": {"rank": 16}},
    "dora": {"model.adapter": {"rank": 16, "dora": True}},
    "adapter on bfloat16": {"model.adapter": {"rank": 16}, "model.dtype": "bfloat16"},
    "nf4": {"model.adapter": {"rank": 16}, "model.quantization": "nf4"},
    "int8": {"model.adapter": {"rank": 16}, "model.quantization": "int8"},
    "fp8": {"model.adapter": {"rank": 16}, "model.quantization": "fp8"},
    "nf4 on bfloat16": {"model.adapter": {"rank": 16}, "model.quantization": "nf4", "model.dtype": "bfloat16"},
    "reference": {"algorithm.beta": 0.04},
    "reference in int8": {"algorithm.beta": 0.04, "reference.quantization": "int8"},
    "reference of an adapter": {"algorithm.beta": 0.04, "model.adapter": {"rank": 16}},
    "critic": {"algorithm.name": "ppo"},
    "stochastic rounding": {"model.dtype": "bfloat16", "optim.stochastic_rounding": True},
    "two processes": {"hardware.processes": 2},
    "two processes, bfloat16 products": {"hardware.processes": 2, "model.compute_dtype": "bfloat16"},
    "two processes, adamw_8bit": {"hardware.processes": 2, "optim.name": "adamw_8bit"},
    "two processes, muon": {"hardware.processes": 2, "optim.name": "muon"},
    "two processes, adapter": {"hardware.processes": 2, "model.adapter": {"rank": 16}},
    "two processes, reference": {"hardware.processes": 2, "algorithm.beta": 0.04},
    "two processes, critic": {"hardware.processes": 2, "algorithm.name": "ppo"},
    "two processes, layers stay": {"hardware.processes": 2, "hardware.reshard_after_forward": False},
}
MODES_WITHOUT_PLAN: dict[str, dict[str, Any]] = {  # that `cohort plan` does not count
    "frozen half": {"model.freeze": ["model.embed_tokens.*", "model.layers.[0-3].*"]},
}
MODES_OF_GPUS: dict[str, dict[str, Any]] = {  # that have no effect on a CPU
    "offloaded activations": {"model.activation_offload": True},
    "offloaded reference": {"algorithm.beta": 0.04, "reference.device": "cpu"},
    "offloaded optimizer": {"optim.offload": True},
    "offloaded parameters": {"model.parameter_offload": True},
}
# Parts of a plan that are counted together, since the allocator cannot tell them apart.
STATE = {
    "weights": ("weights", "adapter", "reference weights", "critic weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer state", "critic optimizer"),
}
PARTS = (*STATE, "activations")
ALL = {**MODES, **MODES_WITHOUT_PLAN, **MODES_OF_GPUS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and what it is trained on: for each process two groups of G completions of C tokens after P."""

    shape: ModelShape
    prompt_tokens: int
    num_completions: int
    completion_tokens: int

    def budget(self, share: float) -> int:
        """Tokens of a prompt and that share of its completions, at least one; the last token of each is no input."""
        return self.prompt_tokens + max(1, int(share * self.num_completions)) * (self.completion_tokens - 1)


SIZES = {
    "full": Size(
        shape=ModelShape(hidden=512, layers=8, intermediate=1536, vocab=8192),
        prompt_tokens=256,
        num_completions=8,
        completion_tokens=64,
    ),
    "tiny": Size(
        shape=ModelShape(hidden=128, layers=3, intermediate=384, vocab=1024, heads=8, kv_heads=4, head_dim=16),
        prompt_tokens=64,
        num_completions=4,
        completion_tokens=32,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one process."""

    counted: Mapping[str, int]  # bytes by part, together the most of forward and backward; without what is not known
    planned: Mapping[str, int]  # the same in the closed form
    update_bytes: int  # counted: the most of an update; 0: not known
    seconds: float  # of a step: processor time, on a GPU all

    @property
    def peak_bytes(self) -> int:
        """The most of a step."""
        return max(sum(self.counted.values()), self.update_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--modes", nargs="+", choices=ALL, default=here(), metavar="NAME", help=str([*ALL]))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(workload, args.job)
        return
    if args.quick:
        args.size, args.modes = "tiny", ["float32", "checkpointing"]
    results: dict[str, Measured] = {}
    if args.json and args.json.exists():
        results = {name: Measured(**found) for name, found in json.loads(args.json.read_text()).items()}
    missing = [name for name in args.modes if name not in results]
    failed: dict[str, str] = {}
    for processes in sorted({processes_of(ALL[name]) for name in missing}):
        found, why = measure_apart([n for n in missing if processes_of(ALL[n]) == processes], args.size)
        results, failed = results | found, failed | why
        if args.json:
            args.json.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    print(f"{machine('torchao')}; one thread for each process\n\n{SIZES[args.size]}\n")
    print(table({name: results[name] for name in args.modes if name in results}, failed))
    if failed:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in failed.items()))


def here() -> list[str]:
    """The modes that this machine can run."""
    gpus = torch.cuda.device_count()
    return (
        [*MODES, *MODES_WITHOUT_PLAN]
        if not gpus
        else [name for name, mode in ALL.items() if processes_of(mode) <= gpus]
    )


def processes_of(mode: Mapping[str, Any]) -> int:
    """How many a mode runs in."""
    return int(mode.get("hardware.processes", 1))


def measure_apart(names: Sequence[str], size: str) -> tuple[dict[str, Measured], dict[str, str]]:
    """Modes of as many processes each, one after the other in such processes; of those that failed, why."""
    (processes,) = {processes_of(ALL[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SIZES[size].shape, Path(folder) / "model")
        found = run_apart(__file__, {"folder": str(model), "size": size, "modes": names}, processes=processes)
    if "skipped" in found:
        return {}, dict.fromkeys(names, found["skipped"])
    failed = {name: result["failed"] for name, result in found.items() if "failed" in result}
    return {name: Measured(**result) for name, result in found.items() if name not in failed}, failed


def workload(job: dict[str, Any]) -> dict[str, Any]:
    """Modes, in a process of its own or in one of several."""
    several = "RANK" in os.environ
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    ranks = join_ranks(backend=backend, timeout_s=600, command_timeout_s=600) if several else SINGLE_PROCESS
    folder, size = Path(job["folder"]), SIZES[job["size"]]
    found = {}
    for name in job["modes"]:
        try:
            found[name] = asdict(measure(configuration(ALL[name], size, folder), size, ranks))
        except Exception as error:
            if several:  # the others would wait for this one
                raise
            found[name] = {"failed": first_line(error)}
    if several:
        leave_ranks()
    return found


def measure(config: Config, size: Size, ranks: Ranks = SINGLE_PROCESS) -> Measured:
    """Count and time a step of a run, on every rank of it.

    Args:
        config: of the run, whose model has the shape of `size`.
        size: of a step.
        ranks: as many as the run has.
    """
    device = rank_device(config, ranks)
    sequences = make_step(size, 2 * ranks.world_size)
    with counting(device, processes=ranks.world_size) as counted:
        with counted.phase("build"):
            worker = build_worker(config, ranks, _spec(config), device=device, tokenizer=_TOKENIZER)
        train(worker, make_step(replace(size, prompt_tokens=3, completion_tokens=2), 2), counted, "first ")
        train(worker, sequences, counted, "")
    phases, begun = counted.phases, _now(device)
    train(worker, sequences, None, "")
    seconds = _now(device) - begun
    return Measured(
        counted=counted_parts(phases),
        planned=planned_parts(config, device),
        update_bytes=max(phase.peak or 0 for name, phase in phases.items() if name.startswith("update")),
        seconds=seconds,
    )


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


_TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)


def configuration(mode: Mapping[str, Any], size: Size, folder: Path) -> Config:
    """A run's configuration with the mode's keys."""
    values = dict(mode)
    budget = size.budget(values.pop("completions", 1))
    raw = {
        "model": {"path": str(folder)},
        "data": {"path": "never-read.jsonl"},
        "rewards": [{"use": "math"}],
        "hardware": {"processes": processes_of(mode)},
        "rollout": {
            "engine": "local",
            "max_prompt_tokens": size.prompt_tokens,
            "max_completion_tokens": size.completion_tokens,
            "num_generations": size.num_completions,
        },
        "train": {"prompts_per_step": 2 * processes_of(mode), "micro_batch_tokens": budget, "learning_rate": 1e-5},
    }
    return config_from_dict(raw, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def make_step(size: Size, num_groups: int) -> list[TrainSequence]:
    """The sequences of a step, with returns for a critic."""
    group = make_group(size.prompt_tokens, [size.completion_tokens] * size.num_completions, size.shape.vocab)
    numbered = [(number, number * len(group) + s.index, s) for number in range(num_groups) for s in group]
    return [replace(s, group=g, index=index, trajectory=index, returns=s.advantages) for g, index, s in numbered]


def train(worker: Worker, sequences: Sequence[TrainSequence], counted: Counted | None, step: str) -> None:
    """A step as a run does it, on every rank: the critic's update, where there is one, and the policy's."""
    parts: list[tuple[str, TrainEngine, PerTokenLoss, Any]] = []
    if worker.critic is not None and worker.algorithm.critic is not None:
        parts.append(("critic", worker.critic, worker.algorithm.critic.loss, pack_batches(worker.critic, sequences)))
    parts.append(("policy", worker.engine, worker.algorithm.policy_loss, pack_batches(worker.engine, sequences)))
    for name, engine, loss, batches in parts:
        with _phase(counted, f"{step}train {name}"):
            engine.forward_backward(batches[worker.ranks.rank], loss)
        with _phase(counted, f"{step}update {name}"):
            engine.optim_step()


def _phase(counted: Counted | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if counted is None else counted.phase(name)


def counted_parts(phases: Mapping[str, Phase]) -> dict[str, int]:
    """What was left by loading, by backward and by the first update; and the most of backward above all that."""
    weights, done = phases["build"].after, phases["first update policy"].after
    backward = [phase for name, phase in phases.items() if name.startswith("train")]
    gradients = max(phase.after - phase.before for phase in backward)
    lasting = {"weights": weights, "gradients": gradients, "optimizer": done - weights}
    peaks = [phase.peak - phase.before for phase in backward if phase.peak is not None]
    return {**lasting, "activations": max(peaks) - gradients} if peaks else lasting


def planned_parts(config: Config, device: torch.device) -> dict[str, int]:
    """The same parts as `cohort plan` has them, without what no tensor holds."""
    processes, on_gpu = config.hardware.processes, device.type == "cuda"
    assert processes != "auto"
    hardware = Hardware(gpu_name="any", gpu_memory_bytes=1 << 50, gpus_per_node=processes, nodes=1, on_gpu=on_gpu)
    backward = dict(predict_run(config, read_shape(config.model.path), hardware).memory.phases["backward"])
    backward.pop("framework", None)
    state = {part: sum(backward.pop(name, 0) for name in names) for part, names in STATE.items()}
    return {**state, "activations": sum(backward.values())}


def _spec(config: Config) -> WorkerSpec:
    assert config.train.micro_batch_tokens != "auto"
    return WorkerSpec(
        folder=Path(config.model.path),
        num_steps=1000,
        checkpoint=None,
        micro_batch_tokens=config.train.micro_batch_tokens,
        longest_sequence_tokens=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
    )


def title(mode: Mapping[str, Any]) -> str:
    """The keys as they are written in a configuration."""
    said = {1 / 2: "half a group", 1 / 4: "a quarter of a group", 0: "one completion"}
    return (
        ", ".join(
            f"`train.micro_batch_tokens`: {said[value]}" if key == "completions" else f"`{key}: {_written(value)}`"
            for key, value in mode.items()
        )
        or "the defaults"
    )


def _written(value: Any) -> str:
    return json.dumps(value).replace('"', "")


def table(results: Mapping[str, Measured], failed: Mapping[str, str] | None = None) -> str:
    """Of each mode megabytes by part, and peak and time as shares of the first; or why it failed."""
    first = next(iter(results.values()), None)
    if first is None:
        return "nothing was measured"

    def rows() -> Iterable[list[str]]:
        for name, r in results.items():
            sizes = [f"{r.counted[part] / 1e6:.1f}" if part in r.counted else "" for part in PARTS]
            peak = f"{r.peak_bytes / first.peak_bytes:.2f}x" if "activations" in r.counted else ""
            yield [title(ALL[name]), *sizes, peak, f"{r.seconds:.2f}", f"{r.seconds / first.seconds:.2f}x"]
        for name, why in (failed or {}).items():
            yield [f"{title(ALL[name])}: {why}", *[""] * (len(PARTS) + 3)]

    return markdown(["keys", *(f"{part}, MB" for part in PARTS), "peak", "seconds", "time"], rows())


if __name__ == "__main__":
    main()
