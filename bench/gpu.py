"""Correctness and throughput on one GPU, in less than ten minutes; no network, random weights.

    bench/gpu.sh [--tiny] [--minutes 9.5]

First what is fast is compared with what is plain (`gpu_checks.py`). Then whole training steps: forward, backward,
AdamW, each case in a process of its own, the better of two steps after one. `tokens/s` counts the tokens of all
sequences, a prompt once for each of its completions; the share of the peak counts the operations that the step needs,
without those of recomputed activations and logits and without those that shared prompts save. Beside the peak of the
GPU's memory (`torch.cuda.max_memory_allocated`) stands what `cohort plan` says of the same step. `--tiny` tries every
part on a CPU, where there is no peak to compare.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baselines import trl_fused
from cohort.plan.flops import peak_flops
from cohort.policy import Policy
from cohort.policy.activations import enable_gradient_checkpointing
from cohort.records import TrainSequence
from gpu_checks import run_checks
from gpu_predicted import add_adapter, predicted_bytes
from harness import (
    FailedError,
    ModelShape,
    do_job,
    forward_backward,
    machine,
    make_engine,
    make_group,
    markdown,
    run_apart,
    try_to,
)

QWEN3_06B = ModelShape(hidden=1024, layers=28, intermediate=3072, vocab=151_936, heads=16, kv_heads=8, head_dim=128)
QWEN3_4B = ModelShape(hidden=2560, layers=36, intermediate=9728, vocab=151_936, heads=32, kv_heads=8, head_dim=128)
QWEN25_7B = ModelShape(
    hidden=3584, layers=28, intermediate=18_944, vocab=152_064, heads=28, kv_heads=4, head_dim=128, tied=False,
    is_qwen2=True,
)  # fmt: skip
TINY = ModelShape(hidden=32, layers=2, intermediate=64, vocab=512, heads=4, kv_heads=2, head_dim=16)
PUBLISHED = [  # prime-rl, benchmarks/results/BENCHMARKS.md, February 2026: its trainer alone on one H100
    ("prime-rl, Qwen3-0.6B, full, 16k (published, H100)", "11,900", "11.1%", "12.5"),
    ("prime-rl, Qwen3-0.6B, full, 65k (published, H100)", "10,200", "26.8%", "19.6"),
    ("prime-rl, Qwen3-4B, LoRA, 16k (published, H100)", "6,200", "21.7%", "23.3"),
]
LEAST_S = 20.0  # a case is not begun with less time left
MOST_CHECKING_S = 200.0  # kernels are compiled meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training step. Weights in `dtype`, products in bfloat16 on GPUs."""

    name: str
    shape: ModelShape
    prompt_tokens: int
    completion_tokens: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = True
    trl: bool = False  # compare with TRL's loss path
    rank: int = 0  # of LoRA on all linear layers; 0: every weight is trained
    most_bytes: int | None = None  # of the GPU's memory that may be used


CASES = (
    Case(
        name="Qwen3-0.6B, 16k, float32 weights", shape=QWEN3_06B, prompt_tokens=512, completion_tokens=(15_872,),
        dtype=torch.float32, checkpointing=False, trl=True,
    ),
    Case(
        name="Qwen3-0.6B, 65k, float32 weights", shape=QWEN3_06B, prompt_tokens=512, completion_tokens=(65_024,),
        dtype=torch.float32,
    ),
    Case(
        name="Qwen2.5-7B, 8 x 4k", shape=QWEN25_7B, prompt_tokens=1024, completion_tokens=(3072,) * 8, trl=True,
    ),
    Case(name="Qwen3-4B, 16k", shape=QWEN3_4B, prompt_tokens=512, completion_tokens=(15_872,)),
    Case(
        name="Qwen2.5-7B, LoRA, 4 x 1k, on 24 GB", shape=QWEN25_7B, prompt_tokens=512, completion_tokens=(1024,) * 4,
        rank=16, most_bytes=24 * 10**9,
    ),
    Case(  # without the optimizer's state where 141 GB are not there
        name="Qwen2.5-7B, float32 weights, 4k", shape=QWEN25_7B, prompt_tokens=512, completion_tokens=(3584,),
        dtype=torch.float32,
    ),
)  # fmt: skip
TINY_CASES = (
    Case(name="tiny", shape=TINY, prompt_tokens=16, completion_tokens=(8, 6), dtype=torch.float32, trl=True),
    Case(
        name="tiny, LoRA", shape=TINY, prompt_tokens=16, completion_tokens=(8, 6), dtype=torch.float32, rank=2,
        most_bytes=10**9,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.5, help="no process runs for longer than what is left")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(work, args.job)
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --tiny tries all of it on a CPU")
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)

    def do(job: dict[str, Any], *, most_s: float = math.inf) -> dict[str, Any]:
        if args.tiny:  # here, where everything is loaded
            return try_to(lambda: work(job))
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return {"skipped": "time is up"}
        try:
            return run_apart(__file__, job, timeout_s=min(left, most_s))
        except FailedError as error:
            return {"failed": str(error)}

    report = Report(args.out)
    report.add_checks(do({"checks": True, "tiny": args.tiny}, most_s=MOST_CHECKING_S))
    for number, case in enumerate(TINY_CASES if args.tiny else CASES):
        for method in ("ours", "trl") if case.trl else ("ours",):
            job = {"case": number, "method": method, "tiny": args.tiny, "updates": True}
            result = do(job)
            if result.get("skipped", "").startswith("out of memory"):
                result = do(job | {"updates": False})
            report.add_case(case, method, result)
    sys.exit(report.failed)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """The checks, or one case by one method."""
    device = torch.device("cpu" if job["tiny"] else "cuda")
    on_gpu = device.type == "cuda"
    if "checks" in job:
        return run_checks(device, tiny=job["tiny"])
    case = (TINY_CASES if job["tiny"] else CASES)[job["case"]]
    if on_gpu and case.most_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.most_bytes / torch.cuda.mem_get_info()[1]))
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(case.shape.config(), dtype=case.dtype)
    if case.rank:
        add_adapter(model, case.rank)
    model.train()
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    compute = torch.float32 if device.type == "cpu" else torch.bfloat16
    sequences = make_group(case.prompt_tokens, case.completion_tokens, case.shape.vocab)
    build = _our_step if job["method"] == "ours" else _trl_step
    step, layout = build(model, compute, sequences, updates=job["updates"])
    step()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    predicted = predicted_bytes(
        model.config, case.prompt_tokens, case.completion_tokens, dtype=case.dtype, compute=compute,
        checkpointing=case.checkpointing, rank=case.rank, updates=job["updates"], on_gpu=on_gpu,
    )  # fmt: skip
    return {
        "seconds": min(seconds),
        "peak_bytes": peak,
        "predicted_bytes": predicted if job["method"] == "ours" else None,
        "updates": job["updates"],
        "layout": layout,
    }


def _our_step(
    model: Any, compute: torch.dtype, sequences: Sequence[TrainSequence], *, updates: bool
) -> tuple[Callable[[], None], str]:
    """Cohort's training step, the whole group in one micro-batch, and how it lays out rows."""
    policy = Policy(model, device=model.device, compute_dtype=compute, pad_token_id=0)
    engine = make_engine(policy, micro_batch_tokens=1 << 30)

    def step() -> None:
        forward_backward(engine, sequences)
        if updates:
            engine.optim_step()
        else:
            model.zero_grad(set_to_none=True)

    return step, policy.layout


def _trl_step(
    model: Any, compute: torch.dtype, sequences: Sequence[TrainSequence], *, updates: bool
) -> tuple[Callable[[], None], str]:
    """TRL's loss path and the same optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        with torch.autocast(model.device.type, dtype=compute, enabled=compute != model.dtype):
            trl_fused(model, sequences)
        if updates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.zero_grad(set_to_none=True)

    return step, "padded"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gibibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f}"


class Report:
    """What has been found so far: printed and written as it comes."""

    def __init__(self, folder: Path):
        self._folder = folder
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self._peak = peak_flops(device, "bfloat16")
        self._found: dict[str, Any] = {"machine": f"{device}; {machine('trl')}", "checks": {}, "cases": []}
        self.failed = False
        print(self._found["machine"], flush=True)

    def add_checks(self, result: dict[str, Any]) -> None:
        """The outcome of all checks."""
        self._found["checks"] = result
        self.failed |= "failed" in result or not all(check["passed"] for check in result.get("checks", []))
        print("\n" + self._checks(), flush=True)
        self._write()

    def add_case(self, case: Case, method: str, result: dict[str, Any]) -> None:
        """The outcome of one case."""
        work = asdict(case) | {"dtype": str(case.dtype), "method": method}
        self.failed |= "failed" in result
        self._found["cases"].append(work | result | self._rates(case, method, result))
        print("\n" + self._cases(), flush=True)
        self._write()

    def _rates(self, case: Case, method: str, result: dict[str, Any]) -> dict[str, Any]:
        if "seconds" not in result:
            return {}
        tokens = sum(case.prompt_tokens + c for c in case.completion_tokens)
        flops = case.shape.flops(case.prompt_tokens, case.completion_tokens, shared=method == "ours")
        share = flops / result["seconds"] / self._peak if self._peak else None
        return {"tokens_per_s": tokens / result["seconds"], "peak_share": share}

    def _checks(self) -> str:
        result = self._found["checks"]
        if "checks" not in result:
            return f"Checks: {result}"
        rows = [
            [
                check["name"],
                "" if check["error"] is None else f"{check['error']:.1e}",
                f"{check['limit']:.1e}",
                check["note"] or ("passed" if check["passed"] else "**FAILED**"),
            ]
            for check in result["checks"]
        ]
        return markdown(["check", "error", "limit", ""], rows)

    def _cases(self) -> str:
        rows = []
        for case in self._found["cases"]:
            name = f"{case['name']}: {case['method']}"
            if "seconds" not in case:
                rows.append([f"{name} ({case.get('skipped', 'failed')})", "", "", "", "", ""])
                continue
            name += f", {case['layout']}"
            name += "" if case["updates"] else ", without the optimizer: its state does not fit"
            share = "" if case["peak_share"] is None else f"{case['peak_share']:.1%}"
            peak, predicted = (_gibibytes(case[key]) for key in ("peak_bytes", "predicted_bytes"))
            if peak and predicted:
                predicted += f" ({case['predicted_bytes'] / case['peak_bytes']:.2f} x)"
            rows.append([name, f"{case['tokens_per_s']:,.0f}", share, peak, predicted, f"{case['seconds']:.2f}"])
        rows += [[*row, "", ""] for row in PUBLISHED]
        header = ["training step", "tokens/s", "share of bf16 peak", "peak GiB", "planned GiB", "seconds"]
        return markdown(header, rows)

    def _write(self) -> None:
        (self._folder / "gpu.json").write_text(json.dumps(self._found, indent=1))
        parts = [self._found["machine"], self._checks(), self._cases()]
        failures = [result["failed"] for result in (self._found["checks"], *self._found["cases"]) if "failed" in result]
        (self._folder / "gpu.md").write_text("\n\n".join([*parts, *failures]) + "\n")


if __name__ == "__main__":
    main()
