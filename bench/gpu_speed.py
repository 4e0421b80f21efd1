"""What a GPU reaches: at best, in a profiled step, in the head alone, and when it samples.

A profile has the time of every kernel, and of kinds of kernels by
their names; idle is what is left of the step. On a CPU operators take the place of kernels.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from ceilings import (
    BenchmarkSize,
    framework_bytes_of_cpu,
    framework_bytes_of_gpu,
    host_bandwidths,
    memory_bandwidth,
    product_flops,
)
from cohort.models import Operands, Policy, linear_logprobs, linear_loss
from cohort.plan.memory import CUDA_BYTES
from cohort.rollout import Sampler, SamplingParams
from cohort.rollout.engines.base import CallKey, SampleRequest
from gpu_predicted import add_adapter, lora_spec
from harness import QWEN3_06B, TINY

MOST_KERNELS = 15
KINDS = {  # by what a kernel's name has in it; the first that fits
    "attention": "attention|attn|flash|fmha",
    "copies": "memcpy|memset|copy_",
    "matrix products": "gemm|nvjet|cutlass|cublas|xmma|gemv|::mm|::addmm|::bmm|::linear",
    "Triton": "^_?[a-z_]*kernel$|triton",
    "reductions and softmax": "reduce|softmax|norm",
    "optimizer": "multi_tensor|adam",
    "elementwise": "elementwise|vectorized|::mul|::add|::silu|foreach",
}


def ceilings(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Matrix products, copies, and the memory of a process without tensors."""
    size = BenchmarkSize(matrix=64, copied_bytes=1 << 16, seconds=0.01) if tiny else BenchmarkSize.default_for(device)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    measured = {f"{name}, TFLOP/s": product_flops(device, dtype, size) / 1e12 for name, dtype in dtypes.items()}
    measured["device memory, read and written, GB/s"] = memory_bandwidth(device, size) / 1e9
    framework = framework_bytes_of_gpu(device) if device.type == "cuda" else framework_bytes_of_cpu()
    measured["process without tensors, GB"] = framework / 1e9
    if device.type == "cuda":
        to_host, to_device = host_bandwidths(device, size)
        measured |= {"to pinned host memory, GB/s": to_host / 1e9, "from it, GB/s": to_device / 1e9}
        measured["process without tensors by the plan, GB"] = CUDA_BYTES / 1e9
    return {"measured": measured}


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run a step twice, and profile the second run.

    Args:
        step: to run.
        device: of its kernels.
    """
    on_gpu = device.type == "cuda"
    step()
    _wait(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        start = time.perf_counter()
        step()
        _wait(device)
        seconds = time.perf_counter() - start
    kernels: Counter[str] = Counter()
    for event in profiler.key_averages():
        if on_gpu and event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            kernels[event.key] += event.self_device_time_total / 1e6
        elif not on_gpu:
            kernels[event.key] += event.self_cpu_time_total / 1e6
    return {"seconds, profiled": seconds, **shares(kernels, seconds)}


def shares(kernels: Mapping[str, float], seconds: float) -> dict[str, str]:
    """Shares of kinds of kernels and idle time, and the kernels that take most time.

    Args:
        kernels: seconds by name.
        seconds: of all, from begin to end.
    """
    kinds: Counter[str] = Counter()
    for name, taken in kernels.items():
        kinds[next((kind for kind, signs in KINDS.items() if re.search(signs, name.lower())), "other")] += taken
    kinds["idle"] = max(0.0, seconds - sum(kernels.values()))
    listed = [*kinds.most_common(), *Counter(kernels).most_common(MOST_KERNELS)]
    return {name[:120]: f"{taken / seconds:.1%} ({1e3 * taken:.1f} ms)" for name, taken in listed}


def head(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Forward and backward of the head in the tiles of a run, with the gradient in backward and in forward."""
    tokens, shape = (30, TINY) if tiny else (8192, QWEN3_06B)
    dtype = torch.float32 if tiny else torch.bfloat16
    hidden = torch.randn(tokens, shape.hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, shape.vocab, (tokens,), device=device)
    operands = Operands(hidden, weight)
    ways: dict[str, Callable[[], Any]] = {
        "gradient in backward": lambda: linear_logprobs(operands, targets, entropy=True)[0].sum().backward(),
        "gradients_in_forward": lambda: linear_loss(operands, targets, lambda logprobs, *_: logprobs)[0].backward(),
    }
    measured = {}
    for name, compute in ways.items():
        compute()
        measured[f"{name}, s"] = seconds = timed(compute, device)
        product = 2 * tokens * shape.vocab * shape.hidden  # forward, and two of its size in backward
        measured[f"{name}, TFLOP/s of three products"] = 3 * product / seconds / 1e12
    return {"measured": measured}


def sampling(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Tokens per second of the local engine: 8 prompts, 8 completions each.

    With weights in bfloat16, and with LoRA on weights in float32 that compute in bfloat16.
    """
    measured = {}
    for name, dtype, rank in (("bfloat16", torch.bfloat16, 0), ("float32, LoRA", torch.float32, 16)):
        with device:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config((TINY if tiny else QWEN3_06B).config(), dtype=dtype)
        if rank:
            add_adapter(model, lora_spec(model, rank))
        policy = Policy(model, device=device, compute_dtype=torch.bfloat16, pad_token_id=0)
        tokens, seconds = _sample(policy, *((12, 4) if tiny else (512, 128)))
        measured |= {f"{name}: tokens": tokens, f"{name}: seconds": seconds, f"{name}: tokens_per_s": tokens / seconds}
    return {"measured": measured}


def _sample(policy: Policy, prompt: int, limit: int) -> tuple[int, float]:
    """Sample once to warm up, and then for measuring; return the number of tokens and the seconds."""
    params = SamplingParams(num_generations=8, max_completion_tokens=limit, temperature=1.0)
    prompts = np.random.default_rng(0).integers(2, policy.model.config.vocab_size, (8, prompt))
    sampler = Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=64)

    def sample(step: int, ids: np.ndarray) -> int:
        key = {"purpose": "train", "seed": 0, "step": step, "epoch": 0}
        requests = [
            SampleRequest(
                token_ids=row,
                sampling=params,
                keys=tuple(CallKey(**key, prompt_id=n, index=index) for index in range(8)),  # type: ignore[arg-type]
            )
            for n, row in enumerate(ids)
        ]
        return sum(len(completion.token_ids) for completion in sampler.sample(requests))

    sample(0, prompts[:1])
    _wait(policy.device)
    start = time.perf_counter()
    tokens = sample(1, prompts)
    return tokens, time.perf_counter() - start


def timed(compute: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""
    _wait(device)
    start = time.perf_counter()
    compute()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
