"""Whole training steps on a GPU: tokens per second, share of the GPU's peak, and memory alongside the plan's.

A step is forward, backward and AdamW on one group, in one micro-batch; the better of two after one that warms up.
`tokens_per_s` counts the tokens of all sequences, a prompt once for each of its completions. `mfu` counts operations as
the metric of that name does (docs/metrics.md): those of the tokens that were computed, a shared prompt once, without
what is computed again. Memory is `torch.cuda.max_memory_allocated`.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baselines import trl_fused
from cohort.metrics.speed import device_peak_flops, flops_of
from cohort.models import Policy
from cohort.models.offload.activation_checkpointing import enable_gradient_checkpointing
from cohort.records import TrainSequence
from comparisons import Check
from gpu_predicted import add_adapter, predicted_bytes
from harness import ModelShape, SkippedError, forward_backward, make_engine, make_group

QWEN3_06B = ModelShape(hidden=1024, layers=28, intermediate=3072, vocab=151_936, heads=16, kv_heads=8, head_dim=128)
QWEN3_4B = ModelShape(hidden=2560, layers=36, intermediate=9728, vocab=151_936, heads=32, kv_heads=8, head_dim=128)
QWEN25_7B = ModelShape(
    hidden=3584, layers=28, intermediate=18_944, vocab=152_064, heads=28, kv_heads=4, head_dim=128, tied=False,
    is_qwen2=True,
)  # fmt: skip
TINY = ModelShape(hidden=32, layers=2, intermediate=64, vocab=512, heads=4, kv_heads=2, head_dim=16)
PUBLISHED = (  # prime-rl, benchmarks/results/BENCHMARKS.md, February 2026: its trainer alone on one H100
    ("prime-rl, Qwen3-0.6B, full, 16k (published, H100)", "11,900", "11.1%", "12.5"),
    ("prime-rl, Qwen3-0.6B, full, 65k (published, H100)", "10,200", "26.8%", "19.6"),
    ("prime-rl, Qwen3-4B, LoRA, 16k (published, H100)", "6,200", "21.7%", "23.3"),
)
AS_PLANNED = 0.1  # the most that a peak may differ from the plan's, as a share of it
Operations = tuple[int, int, int]  # tokens, scored positions and attended pairs that are computed


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


QUICK_CASE = Case(
    name="Qwen3-0.6B, 8 x 512", shape=QWEN3_06B, prompt_tokens=512, completion_tokens=(512,) * 8, dtype=torch.float32,
)  # fmt: skip
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


def run_case(case: Case, device: torch.device, *, trl: bool = False) -> dict[str, Any]:
    """Measure a case.

    Args:
        case: what is computed.
        device: where.
        trl: by TRL's loss path, and not by Cohort.

    Raises:
        SkippedError: it does not fit this GPU by the plan, or TRL is missing.
    """
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    updates = _fits_with_updates(case, device, compute)
    model = _model(case, device)
    sequences = make_group(case.prompt_tokens, case.completion_tokens, case.shape.vocab)
    step, layout = (_trl_step if trl else _our_step)(model, compute, sequences, updates=updates)
    seconds, peak, operations = _measure(step, device)
    tokens, scored, pairs = operations
    flops = flops_of(model).forward_backward(tokens=tokens, loss_tokens=scored, pairs=pairs)
    best = device_peak_flops(device, compute)
    planned = None if trl else _planned(case, compute, updates=updates, on_gpu=device.type == "cuda")
    checks = []
    if peak is not None and planned is not None:
        checks.append(Check(name=f"{case.name}: peak and plan", error=abs(peak / planned - 1), limit=AS_PLANNED).row())
    measured = {
        "method": "trl" if trl else "ours",
        "layout": layout,
        "updates": updates,
        "seconds": seconds,
        "tokens_per_s": sum(case.prompt_tokens + c for c in case.completion_tokens) / seconds,
        "flops": flops,
        "mfu": flops / seconds / best if best else None,
        "peak_bytes": peak,
        "planned_bytes": planned,
    }
    return {"checks": checks, "step": asdict(case) | {"dtype": str(case.dtype)} | measured}


def _fits_with_updates(case: Case, device: torch.device, compute: torch.dtype) -> bool:
    """Whether there is room for AdamW's state too. Limits memory to what the case may use.

    Raises:
        SkippedError: there is no room even without it.
    """
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info()
    room = min(free, case.most_bytes or free)
    torch.cuda.set_per_process_memory_fraction(room / total)
    for updates in (True, False):
        planned = _planned(case, compute, updates=updates, on_gpu=True)
        if planned < room:
            return updates
    raise SkippedError(f"the plan says {planned / 2**30:.1f} GiB, and there are {room / 2**30:.1f}")


def _planned(case: Case, compute: torch.dtype, *, updates: bool, on_gpu: bool) -> int:
    return predicted_bytes(
        case.shape.config(), case.prompt_tokens, case.completion_tokens, dtype=case.dtype, compute=compute,
        checkpointing=case.checkpointing, rank=case.rank, updates=updates, on_gpu=on_gpu,
    )  # fmt: skip


def _model(case: Case, device: torch.device) -> Any:
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(case.shape.config(), dtype=case.dtype)
    if case.rank:
        add_adapter(model, case.rank)
    model.train()
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    return model


def _measure(step: Callable[[], Operations], device: torch.device) -> tuple[float, int | None, Operations]:
    """Seconds of the better of two steps, their peak, and their operations."""
    on_gpu = device.type == "cuda"
    operations = step()
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), torch.cuda.max_memory_allocated() if on_gpu else None, operations


def _our_step(
    model: Any, compute: torch.dtype, sequences: Sequence[TrainSequence], *, updates: bool
) -> tuple[Callable[[], Operations], str]:
    """Cohort's training step, the whole group in one micro-batch, and how it lays out rows."""
    policy = Policy(model, device=model.device, compute_dtype=compute, pad_token_id=0)
    engine = make_engine(policy, micro_batch_tokens=1 << 30)
    scored = sum(s.num_loss_tokens for s in sequences)

    def step() -> Operations:
        result = forward_backward(engine, sequences)
        if updates:
            engine.optim_step()
        else:
            model.zero_grad(set_to_none=True)
        return result.num_computed_tokens, scored, result.attention_pairs

    return step, policy.layout


def _trl_step(
    model: Any, compute: torch.dtype, sequences: Sequence[TrainSequence], *, updates: bool
) -> tuple[Callable[[], Operations], str]:
    """TRL's loss path and the same optimizer. Padding is not among its operations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lengths = [len(s.token_ids) - 1 for s in sequences]  # the last token is no input
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    scored = sum(s.num_loss_tokens for s in sequences)

    def step() -> Operations:
        with torch.autocast(model.device.type, dtype=compute, enabled=compute != model.dtype):
            trl_fused(model, sequences)
        if updates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return sum(lengths), scored, pairs

    return step, "padded"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
