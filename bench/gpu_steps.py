"""Whole training steps on a GPU: tokens per second, share of the GPU's peak, and memory alongside the plan's.

A step is forward, backward and AdamW on one group, in one micro-batch; the better of two after one that warms up.
`tokens_per_s` counts the tokens of all sequences, a prompt once for each of its completions. `mfu` counts operations as
the metric of that name does (docs/metrics.md): those of the tokens that were computed, a shared prompt once, without
what is computed again. Memory is `torch.cuda.max_memory_allocated`. Of offload, the bytes that cross the bus in a step
are counted; divided by the step's time they say what the bus had to reach at least.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from baselines import trl_fused
from cohort.config import ModelConfig
from cohort.metrics.resources import device_peak_flops, flops_of
from cohort.models import CollectiveCounter, Policy
from cohort.models.activation_checkpointing import (
    ActivationOffload,
    enable_gradient_checkpointing,
    enable_offload,
)
from cohort.models.fsdp import Sharding
from cohort.models.host_memory import MasterWeights
from cohort.models.loading.meta_device import meta_model
from cohort.models.quantization import replace_quantized_layers
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.join import init_single_process_group
from cohort.records import TrainSequence
from comparisons import Check
from gpu_predicted import add_adapter, lora_spec, predicted_bytes
from gpu_speed import profile_step
from harness import QWEN3_06B, TINY, ModelShape, SkippedError, forward_backward, make_engine, make_group

QWEN3_4B = ModelShape(hidden=2560, layers=36, intermediate=9728, vocab=151_936, heads=32, kv_heads=8, head_dim=128)
QWEN25_7B = ModelShape(
    hidden=3584, layers=28, intermediate=18_944, vocab=152_064, heads=28, kv_heads=4, head_dim=128, tied=False,
    is_qwen2=True,
)  # fmt: skip
PUBLISHED = (  # prime-rl, benchmarks/results/BENCHMARKS.md, February 2026: its trainer alone on one H100
    ("prime-rl, Qwen3-0.6B, full, 16k (published, H100)", "11,900", "11.1%", "12.5"),
    ("prime-rl, Qwen3-0.6B, full, 65k (published, H100)", "10,200", "26.8%", "19.6"),
    ("prime-rl, Qwen3-4B, LoRA, 16k (published, H100)", "6,200", "21.7%", "23.3"),
)
STEPS = 3  # of which the first warms up
AS_PLANNED = 0.1  # the most that a peak may differ from the plan's, as a share of it
Operations = tuple[int, int, int]  # tokens, scored positions and attended pairs that are computed
Offload = Literal["activations", "optimizer", "parameters"]


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
    is_nf4: bool = False  # the frozen matrices of layers
    offload: Offload | None = None


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
PROFILED_CASE = replace(CASES[2], name="Qwen2.5-7B, 4 x 4k", completion_tokens=(3072,) * 4)
QLORA_CASE = replace(CASES[4], name="Qwen2.5-7B, nf4, 4 x 1k, on 24 GB", is_nf4=True)
_OFFLOAD = Case(
    name="Qwen3-4B, 4 x 2k", shape=QWEN3_4B, prompt_tokens=512, completion_tokens=(1792,) * 4, dtype=torch.float32,
)  # fmt: skip
OFFLOAD_CASES = (
    replace(_OFFLOAD, name=f"{_OFFLOAD.name}, none"),
    replace(_OFFLOAD, name=f"{_OFFLOAD.name}, activations", offload="activations"),
    replace(_OFFLOAD, name=f"{_OFFLOAD.name}, optimizer", offload="optimizer"),
    replace(_OFFLOAD, name=f"{_OFFLOAD.name}, parameters", offload="parameters"),
)
TINY_CASES = (
    Case(name="tiny", shape=TINY, prompt_tokens=16, completion_tokens=(8, 6), dtype=torch.float32, trl=True),
    Case(
        name="tiny, LoRA", shape=TINY, prompt_tokens=16, completion_tokens=(8, 6), dtype=torch.float32, rank=2,
        most_bytes=10**9,
    ),
)  # fmt: skip
_QLORA_SHAPE = replace(TINY, hidden=64, heads=8, kv_heads=4, head_dim=16)  # blocks of 64 weights
TINY_QLORA_CASE = replace(TINY_CASES[1], name="tiny, nf4", shape=_QLORA_SHAPE, is_nf4=True)
TINY_OFFLOAD_CASES = tuple(
    replace(TINY_CASES[0], name=f"tiny, {kind}", trl=False, offload=kind) for kind in ("optimizer", "parameters")
)


def run_case(case: Case, device: torch.device, *, trl: bool = False) -> dict[str, Any]:
    """Measure a case.

    Args:
        case: what is computed.
        device: where.
        trl: by TRL's loss path, and not by Cohort.

    Raises:
        SkippedError: it does not fit this GPU by the plan, or a package is missing.
    """
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    updates = _fits_with_updates(case, device, compute)
    built = _build(case, device, compute, updates=updates, trl=trl)
    seconds, peak, operations = _measure(built.step, device)
    tokens, scored, pairs = operations
    flops = flops_of(built.model).forward_backward(tokens=tokens, loss_tokens=scored, pairs=pairs)
    best = device_peak_flops(device, compute)
    planned = None if trl else _planned(case, compute, updates=updates, on_gpu=device.type == "cuda")
    checks = []
    if peak is not None and planned is not None:
        checks.append(Check(name=f"{case.name}: peak and plan", error=abs(peak / planned - 1), limit=AS_PLANNED).row())
    measured = {
        "method": "trl" if trl else "ours",
        "layout": built.layout,
        "updates": updates,
        "seconds": seconds,
        "tokens_per_s": sum(case.prompt_tokens + c for c in case.completion_tokens) / seconds,
        "flops": flops,
        "mfu": flops / seconds / best if best else None,
        "peak_bytes": peak,
        "planned_bytes": planned,
        "moved_bytes": _moved_bytes(case, built, compute),
    }
    return {"checks": checks, "step": asdict(case) | {"dtype": str(case.dtype)} | measured}


def profiled(case: Case, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Where the time of one step goes: the kernels that take most of it, and shares of kinds of kernels."""
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    built = _build(case, device, compute, updates=_fits_with_updates(case, device, compute), trl=False)
    return {"measured": profile_step(built.step, device)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A model and its step."""

    model: Any
    step: Callable[[], Operations]
    layout: str  # of rows
    activations: ActivationOffload | None = None


def _build(case: Case, device: torch.device, compute: torch.dtype, *, updates: bool, trl: bool) -> _Built:
    sequences = make_group(case.prompt_tokens, case.completion_tokens, case.shape.vocab)
    if trl:
        model = _model(case, device)
        return _Built(model=model, step=_trl_step(model, compute, sequences, updates=updates), layout="padded")
    activations = None
    if case.offload == "parameters":
        policy = _policy_on_host(case, device, compute)
    else:
        model = _model(case, device)
        masters = MasterWeights(model, compute) if case.offload == "optimizer" else None
        activations = enable_offload(model) if case.offload == "activations" else None
        policy = Policy(model, device=device, compute_dtype=compute, pad_token_id=0, master_weights=masters)
    step = _our_step(policy, sequences, updates=updates)
    return _Built(model=policy.model, step=step, layout=policy.layout, activations=activations)


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
    more: dict[str, Any] = {
        "quantization": "nf4" if case.is_nf4 else None,
        "offload": case.offload == "activations",
        "masters_on_host": case.offload == "optimizer",
        "parameters_on_host": case.offload == "parameters",
    }
    return predicted_bytes(
        case.shape.config(), case.prompt_tokens, case.completion_tokens, dtype=case.dtype, compute=compute,
        checkpointing=case.checkpointing, rank=case.rank, updates=updates, on_gpu=on_gpu, **more,
    )  # fmt: skip


def _moved_bytes(case: Case, built: _Built, compute: torch.dtype) -> int | None:
    """Bytes that cross the bus in a step, both ways; None without offload."""
    weights = sum(p.numel() for p in built.model.parameters())
    match case.offload:
        case "activations":
            assert built.activations is not None
            return 2 * built.activations.num_bytes_moved // STEPS
        case "optimizer":  # gradients in the masters' dtype, weights in that of products
            return weights * (case.dtype.itemsize + compute.itemsize)
        case "parameters":  # weights for forward and for backward, gradients
            return weights * 3 * case.dtype.itemsize
    return None


def _model(case: Case, device: torch.device) -> Any:
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(case.shape.config(), dtype=case.dtype)
    adapter = lora_spec(model, case.rank) if case.rank else None
    if case.is_nf4:
        _quantize(model, case.dtype)
    if adapter is not None:
        add_adapter(model, adapter)
    model.train()
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    return model


def _quantize(model: Any, compute_dtype: torch.dtype) -> None:
    """Quantize the matrices of a model's layers where they are, as loading with `model.quantization: nf4` does.

    Raises:
        SkippedError: bitsandbytes is missing.
    """
    if find_spec("bitsandbytes") is None:
        raise SkippedError("needs bitsandbytes, not installed")
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    model.requires_grad_(False)
    for layer in [m for m in model.base_model.layers.modules() if isinstance(m, nn.Linear)]:
        codes, state = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
        layer.weight = Params4bit(codes, quant_state=state, quant_type="nf4", bnb_quantized=True)
    replace_quantized_layers(model, compute_dtype)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _policy_on_host(case: Case, device: torch.device, compute: torch.dtype) -> Policy:
    """The policy of a run with `model.parameter_offload`, with random weights."""
    first = Policy(
        _model(replace(case, shape=replace(case.shape, layers=1)), device), device=device, compute_dtype=compute,
        pad_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        case.shape.config().save_pretrained(folder)
        model = meta_model(ModelConfig(path=folder, dtype=str(case.dtype).removeprefix("torch.")))
    model.set_attn_implementation(first.traits.attention)
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    init_single_process_group(device)
    mesh = SINGLE_PROCESS.device_mesh(device.type)
    counter = CollectiveCounter()
    sharding = Sharding(model, counter, mesh=mesh, device=device, compute_dtype=compute, on_host=True)
    sharding.allocate()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        rows = parameter.detach().to_local()
        is_matrix = rows.ndim > 1
        numbers = torch.randn(rows.shape, device=device, generator=generator) * 0.02 if is_matrix else torch.ones(1)
        rows.copy_(numbers)
    sharding.finalize()
    return Policy(model, device=device, compute_dtype=compute, pad_token_id=0, traits=first.traits, sharding=sharding)


def _measure(step: Callable[[], Operations], device: torch.device) -> tuple[float, int | None, Operations]:
    """Seconds of the better of two steps, their peak, and their operations."""
    on_gpu = device.type == "cuda"
    operations = step()
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS - 1):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), torch.cuda.max_memory_allocated() if on_gpu else None, operations


def _our_step(policy: Policy, sequences: Sequence[TrainSequence], *, updates: bool) -> Callable[[], Operations]:
    """Cohort's training step, the whole group in one micro-batch."""
    engine = make_engine(policy, micro_batch_tokens=1 << 30)
    scored = sum(s.num_loss_tokens for s in sequences)

    def step() -> Operations:
        result = forward_backward(engine, sequences)
        if updates:
            engine.optim_step()
        else:
            policy.model.zero_grad(set_to_none=True)
        return result.num_computed_tokens, scored, result.attention_pairs

    return step


def _trl_step(
    model: Any, compute: torch.dtype, sequences: Sequence[TrainSequence], *, updates: bool
) -> Callable[[], Operations]:
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

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
