"""What the benchmarks of memory and time share: random models, one group of completions, processes of their own.

P prompt tokens, G completions of it, C tokens of a completion, H hidden, V vocabulary.
"""

import ctypes
import gc
import importlib.metadata
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig, ModelConfig, TrainConfig
from cohort.errors import RankDesyncError
from cohort.learner import TokenBudget, TrainEngine, TrainResult
from cohort.learner.memory_fallback import is_out_of_memory
from cohort.metrics.resources import reset_resident_peak, resident
from cohort.models import LoadRequest, Policy, load_policy, quiet_transformers
from cohort.packing import pack
from cohort.packing.batch import PolicyLoss
from cohort.records import TrainSequence

RESULT = "result: "  # before the JSON that a process prints for the one that started it
_MALLOC = {"trim_threshold": -1, "mmap_threshold": -3, "mmap_max": -4}  # M_... of malloc.h
_BUCKETS = 64
_IN_GROUP = "COHORT_BENCH_GROUP"  # set in processes that end with the one that started the first of them


class SkippedError(Exception):
    """This case cannot be measured here; the message says why."""


class FailedError(Exception):
    """A process ended without a result; the message has what it said last, `output` what it printed before."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model of random weights: Qwen3's type, or Qwen2's."""

    hidden: int
    layers: int
    vocab: int
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int
    tied: bool = True
    is_qwen2: bool = False

    @property
    def attention_width(self) -> int:
        """Query heads times their dimension."""
        return self.heads * self.head_dim

    @property
    def body_weights(self) -> int:
        """Weights of the layers' matrices, without embedding and head."""
        projections = 2 * self.attention_width + 2 * self.kv_heads * self.head_dim
        return self.layers * self.hidden * (projections + 3 * self.intermediate)

    def config(self) -> Qwen2Config | Qwen3Config:
        """The library's configuration of it."""
        kind, extra = (Qwen2Config, {}) if self.is_qwen2 else (Qwen3Config, {"head_dim": self.head_dim})
        return kind(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=1 << 17,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
            eos_token_id=1,
            **extra,
        )

    def flops(
        self, prompt_tokens: int, completion_tokens: Sequence[int], *, shared: bool, recomputed: bool = False
    ) -> float:
        """Operations of forward and backward of a group: matrices, causal attention, head.

        Args:
            prompt_tokens: P.
            completion_tokens: [G]; the last token of each is no input.
            shared: the prompt is computed once.
            recomputed: count what attention and head compute again in backward.
        """
        inputs = [c - 1 for c in completion_tokens]
        if shared:
            tokens = prompt_tokens + sum(inputs)
            pairs = _pairs(prompt_tokens) + sum(n * prompt_tokens + _pairs(n) for n in inputs)
        else:
            tokens = sum(prompt_tokens + n for n in inputs)
            pairs = sum(_pairs(prompt_tokens + n) for n in inputs)
        attention = (14 if recomputed else 12) * self.attention_width * self.layers * pairs
        head = (8 if recomputed else 6) * sum(completion_tokens) * self.vocab * self.hidden
        return 6 * self.body_weights * tokens + attention + head


QWEN3_06B = ModelShape(hidden=1024, layers=28, intermediate=3072, vocab=151_936, heads=16, kv_heads=8, head_dim=128)
TINY = ModelShape(hidden=32, layers=2, intermediate=64, vocab=512, heads=4, kv_heads=2, head_dim=16)


def _pairs(length: int) -> float:
    """Pairs of tokens of which one sees the other."""
    return length * (length + 1) / 2


def write_model(shape: ModelShape, folder: Path) -> Path:
    """A model folder without a tokenizer, the same for the same shape."""
    if not folder.exists():
        torch.manual_seed(0)
        with quiet_transformers():
            AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32).save_pretrained(folder)
    return folder


def load(folder: Path, device: str = "cpu", **model: Any) -> Policy:
    """The policy of a folder, with keys of the `model` section."""
    config = ModelConfig(path=str(folder), **model)
    return load_policy(LoadRequest(config, device=torch.device(device), tokenizer=SimpleNamespace(pad_token_id=0)))


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Completion lengths spread evenly, in a random order."""
    return np.random.default_rng(0).permutation(np.linspace(shortest, longest, count).round().astype(int)).tolist()


def make_group(prompt_tokens: int, completion_tokens: Sequence[int], vocab: int) -> list[TrainSequence]:
    """One group of random tokens with advantages from -1 to 1 and GRPO's weights: the mean of means."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, vocab, prompt_tokens)
    count = len(completion_tokens)
    return [
        TrainSequence.single_turn(
            prompt,
            rng.integers(2, vocab, length),
            index=n,
            group=0,
            sampling_logprobs=-math.log(vocab),
            loss_weights=1 / (count * length),
            advantages=2 * (n + 0.5) / count - 1,
        )
        for n, length in enumerate(completion_tokens)
    ]


def grpo() -> PolicyLoss:
    """GRPO's loss per token."""
    return build_algorithm(AlgorithmConfig(), max_completion_tokens=1).policy_loss


def make_engine(policy: Policy, *, micro_batch_tokens: int, learning_rate: float = 1e-6, **train: Any) -> TrainEngine:
    """The engine with keys of the `train` section."""
    return TrainEngine(
        policy,
        TrainConfig(**train),
        budget=TokenBudget(micro_batch_tokens),
        learning_rate=lambda _: learning_rate,
        temperature=1.0,
        reference=None,
    )


def forward_backward(engine: TrainEngine, sequences: Sequence[TrainSequence]) -> TrainResult:
    """Pack the sequences under the engine's budget and add their gradient, as a training step does.

    Raises:
        RankDesyncError: the engine ran out of memory and went on with smaller micro-batches than were asked for.
    """
    (batch,) = pack(
        sequences,
        micro_batch_tokens=engine.budget.tokens,
        share_prompts=engine.policy.shares_prompts,
        padded=engine.policy.layout == "padded",
    )
    result = engine.forward_backward(batch, grpo())
    if result.num_out_of_memory:
        raise RankDesyncError("out of memory at this budget")
    return result


def measure(step: Callable[[], Any], forget: Callable[[], None], warm_up: Callable[[], Any]) -> dict[str, float]:
    """Peak memory of a step above what was there before, and its time in a second pass.

    Args:
        step: what is measured.
        forget: clears the gradients.
        warm_up: a tiny step of the same kind, which loads code and touches the weights.

    Returns:
        `peak_bytes`, and the `seconds` of the processor and `wall_s`. On a GPU memory is what PyTorch's allocator has
        given out, and both times are those of the step.
    """
    if torch.cuda.is_available():
        return _measure_on_gpu(step, forget, warm_up)
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_MALLOC["mmap_threshold"], 1 << 20)  # what is freed is gone: the peak is what lives at one time
    warm_up()
    forget()
    gc.collect()
    libc.malloc_trim(0)
    if not reset_resident_peak():
        raise SkippedError("this system cannot set a process's peak memory back")
    before = resident()["VmRSS"]
    step()
    peak = resident()["VmHWM"] - before
    forget()
    # Time without the faults of pages that the system would take back and give again: all comes from one kept heap.
    libc.mallopt(_MALLOC["mmap_max"], 0)
    libc.mallopt(_MALLOC["trim_threshold"], 1 << 46)
    heap = torch.zeros(max(1, peak), dtype=torch.uint8)
    del heap
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return {"peak_bytes": peak, "seconds": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def _measure_on_gpu(
    step: Callable[[], Any], forget: Callable[[], None], warm_up: Callable[[], Any]
) -> dict[str, float]:
    warm_up()
    forget()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    forget()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"peak_bytes": peak, "seconds": seconds, "wall_s": seconds}


def sketch(model: torch.nn.Module) -> dict[str, list[float]]:
    """A short stand-in for every parameter's gradient, from which distances can be told.

    Each gradient's elements are dealt to buckets and added up with random signs: the squared norm of the difference of
    two sketches is, on average, that of the difference of the gradients (count sketch, Charikar et al. 2002).
    """
    sketches = {}
    for name, parameter in model.named_parameters():
        flat: Tensor = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat = flat.detach().flatten().float().cpu()
        rows = math.ceil(len(flat) / _BUCKETS)
        signs = torch.randint(0, 2, (rows,), generator=torch.Generator().manual_seed(rows)).float() * 2 - 1
        padded = torch.nn.functional.pad(flat, (0, rows * _BUCKETS - len(flat)))
        sketches[name] = (signs @ padded.view(rows, _BUCKETS)).tolist()
    return sketches


def disagreement(a: Mapping[str, list[float]], b: Mapping[str, list[float]]) -> tuple[float, str]:
    """Largest relative distance of any parameter's gradient between two sketches, and whose it is."""
    distances = []
    for name in b:
        norm = float(np.linalg.norm(b[name]))
        distance = float(np.linalg.norm(np.subtract(a[name], b[name])))
        distances.append((distance / norm if norm else float(distance > 0), name))
    return max(distances)


def run_apart(
    script: str,
    job: Mapping[str, Any],
    *,
    arguments: Sequence[str] = (),
    processes: int = 1,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Do a job in a process of its own, or in several: what it returned, on rank 0, or `skipped` and why.

    Args:
        script: that calls `do_job` where it is given `--job`.
        job: for it.
        arguments: of the script besides.
        processes: ranks that do it together.
        timeout_s: the longest that it may take.

    Raises:
        FailedError: it ended in another way, or not in time.
    """
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    added = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = run_command(
        [sys.executable, *ranks, script, *arguments, "--job", json.dumps(job)], added, timeout_s=timeout_s
    )
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    if done.returncode == -signal.SIGKILL:
        return {"skipped": "killed, likely for its memory", "out_of_memory": True}
    raise FailedError(f"{job} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def run_command(
    command: Sequence[str], added: Mapping[str, str] | None = None, *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Whatever it has started ends with it.

    Args:
        command: with its arguments.
        added: to the environment.
        timeout_s: the longest that it may take.

    Raises:
        FailedError: it took longer.
    """
    environment = {**os.environ, **(added or {}), _IN_GROUP: "1"}
    leads = _IN_GROUP not in os.environ  # else the group is that of the command around this one, and ends with it
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=leads)
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                if leads:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            code = process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if timed_out:
        message = f"{' '.join(command)} did not end within {timeout_s:.0f} s:\n{texts[1][-3000:]}"
        raise FailedError(message, texts[0])
    return subprocess.CompletedProcess(list(command), code, *texts)


def do_job(work: Callable[[dict[str, Any]], dict[str, Any]], job: str) -> None:
    """The other end of `run_apart`: print what the work returns, or why it could not be done."""
    torch.set_num_threads(1)
    result = try_to(lambda: work(json.loads(job)))
    if os.environ.get("RANK", "0") == "0":
        print(RESULT + json.dumps(result))


def limit_memory() -> None:
    """Have allocations fail beyond nine tenths of what is free, before the system kills a neighbor."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(0.9 * 1024 * int(fields["MemAvailable"].split()[0]))
    resource.setrlimit(resource.RLIMIT_DATA, (free, free))


def try_to(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work returns, or `skipped` and why it could not be done; `out_of_memory` where that is why."""
    try:
        return work()
    except SkippedError as error:
        return {"skipped": str(error)}
    except RankDesyncError as error:
        return {"skipped": str(error), "out_of_memory": True}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"skipped": "out of memory", "out_of_memory": True}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every column but the first is aligned to the right."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(*packages: str) -> str:
    """Processor, memory and versions, for the line above a table."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = []
    for name in ("torch", "transformers", *packages):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, " + ", ".join(
        versions
    )
