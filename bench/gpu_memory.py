"""How a GPU's memory is used: by a process without tensors, in segments that can grow, and when there is too little.

Out of memory is made by a limit on PyTorch's allocator. On a CPU, where there is none, a pass over more tokens than the
smaller budget raises PyTorch's error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cohort.learner import TrainEngine, WorstCaseShard, find_budget
from cohort.learner.memory_fallback import is_out_of_memory
from cohort.models import Policy
from cohort.packing import pack
from cohort.records import TrainSequence
from cohort.rollout.engines.servers.cuda_ipc import allocate
from cohort.trainer.setup import use_expandable_segments
from comparisons import Check, first_line
from harness import TINY, ModelShape, SkippedError, grpo, make_engine, make_group

EXACT = 1e-4  # relative error of a gradient in float32
SMALL = ModelShape(hidden=1024, layers=8, intermediate=3072, vocab=32_768, heads=16, kv_heads=8, head_dim=64)


def begin(device: torch.device) -> dict[str, int]:
    """Start to use a GPU as a run does; what the driver reports as used before the first tensor, by all processes."""
    use_expandable_segments()
    torch.cuda.init()
    torch.cuda.synchronize(device)
    return {"used_before_bytes": _used_bytes(device)}


def peaks(device: torch.device) -> dict[str, int]:
    """The most that tensors took and that the allocator held, and what the driver says is used now, by all."""
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "used_bytes": _used_bytes(device),
    }


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def segments(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Whether segments can grow, and the buffer for another process lies outside of them.

    Raises:
        SkippedError: there is no GPU.
    """
    if device.type == "cpu":
        raise SkippedError("needs CUDA")
    use_expandable_segments()
    tensor, shared = torch.empty(1 << 26, dtype=torch.uint8, device=device), allocate(1 << 26, device)
    after = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    snapshot = torch.cuda.memory._snapshot()

    def can_grow(of: Tensor) -> bool:
        (found,) = (s for s in snapshot["segments"] if 0 <= of.data_ptr() - s["address"] < s["total_size"])
        return bool(found["is_expandable"])

    wrong = {
        "expandable segments are off": not snapshot["allocator_settings"]["expandable_segments"],
        "a tensor is in a fixed segment": not can_grow(tensor),
        "a tensor after the shared buffer is in a fixed segment": not can_grow(after),
        "the shared buffer is in one that can grow": can_grow(shared),
    }
    checks = [
        Check(name=f"expandable segments: {name}", error=float(is_so), limit=0.0) for name, is_so in wrong.items()
    ]
    return {"checks": [check.row() for check in checks]}


def out_of_memory(device: torch.device, tiny: bool) -> dict[str, Any]:
    """A step whose budget is too large, and the search for the largest one that is not."""
    shape, prompt, lengths = (TINY, 9, (6,) * 8) if tiny else (SMALL, 256, (512,) * 16)
    sequences = make_group(prompt, lengths, shape.vocab)
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    policy = Policy(model, device=device, compute_dtype=None, pad_token_id=0)
    whole = prompt + sum(lengths) - len(lengths)
    small = whole // 2
    expected, _, small_peak = _gradient(policy, sequences, small)
    _, _, whole_peak = _gradient(policy, sequences, whole)
    texts: list[str] = []
    with _limited(device, (small_peak + whole_peak) // 2, most_tokens=small), _recorded(texts):
        actual, failures, _ = _gradient(policy, sequences, whole)
        found, again = _search(policy, sequences, whole)
    distance = torch.stack([(a - e).norm() for a, e in zip(actual, expected, strict=True)]).norm()
    error = (distance / torch.stack([e.norm() for e in expected]).norm()).item()
    checks = [
        Check(name="a budget that does not fit: no failure was seen", error=float(failures == 0), limit=0.0),
        Check(name="its gradient, and that of a budget which fits", error=error, limit=EXACT),
        Check(name="micro_batch_tokens: auto: failures in two steps", error=float(again), limit=0.0),
    ]
    measured = {"budget that fails": whole, "budget that was found": found, "failures": failures}
    return {"checks": [check.row() for check in checks], "measured": measured | {"messages": sorted(set(texts))}}


def _gradient(policy: Policy, sequences: list[TrainSequence], budget: int) -> tuple[list[Tensor], int, int]:
    """The gradient of a step, on the host; how often memory ran out; and the peak, 0 on a CPU."""
    on_gpu = policy.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = make_engine(policy, micro_batch_tokens=budget)
    failures = _forward_backward(engine, sequences)
    gradient = [p.grad.detach().cpu() for p in policy.model.parameters()]
    policy.model.zero_grad(set_to_none=True)
    return gradient, failures, torch.cuda.max_memory_reserved() if on_gpu else 0


def _search(policy: Policy, sequences: list[TrainSequence], most: int) -> tuple[int, int]:
    """The budget that is found for the step, and how often memory runs out in two steps with it."""
    engine = make_engine(policy, micro_batch_tokens=most)
    first = sequences[0]
    shard = WorstCaseShard(
        prompt_tokens=first.shared_prefix_tokens,
        completion_tokens=first.num_loss_tokens,
        num_generations=len(sequences),
        num_sequences=len(sequences),
    )
    found = find_budget(engine, grpo(), shard=shard, max_tokens=most)
    failures = 0
    for _ in range(2):
        failures += _forward_backward(engine, sequences)
        engine.optim_step()
    return found, failures


def _forward_backward(engine: TrainEngine, sequences: list[TrainSequence]) -> int:
    """Add the gradient of a step; how often memory ran out."""
    policy = engine.policy
    (batch,) = pack(
        sequences,
        micro_batch_tokens=engine.budget.tokens,
        share_prompts=policy.shares_prompts,
        padded=policy.layout == "padded",
    )
    return engine.forward_backward(batch, grpo()).num_out_of_memory


@contextmanager
def _limited(device: torch.device, num_bytes: int, *, most_tokens: int) -> Iterator[None]:
    """Limit what the allocator may hold, or, on a CPU, the tokens of a pass."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.mem_get_info(device)[1], device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    compute = Policy.logprobs

    def limited(policy: Policy, micro_batch: Any, **options: Any) -> Any:
        if len(micro_batch.input_ids) > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Made up for a CPU")
        return compute(policy, micro_batch, **options)

    with patch.object(Policy, "logprobs", limited):
        yield


@contextmanager
def _recorded(texts: list[str]) -> Iterator[None]:
    """Keep the first line of every error that may be one of memory."""

    def record(error: BaseException) -> bool:
        texts.append(first_line(error))
        return is_out_of_memory(error)

    with patch("cohort.learner.forward_backward.is_out_of_memory", record):
        yield
