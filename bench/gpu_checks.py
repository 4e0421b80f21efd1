"""Whether what is fast on a GPU computes what is plain: attention, head, matrix products, budgets, a whole step.

Each check compares with a computation in float64 on the CPU: one unpadded forward pass per completion and its full
logits. Where a product rounds to bfloat16, the plain way in bfloat16 is measured too, and is the limit.
"""

import copy
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cohort.config import AdamwConfig, ModelConfig
from cohort.learner.optimizer import Optimizers
from cohort.models import LoadRequest, Operands, Policy, linear_logprobs, linear_loss, load_policy
from cohort.models.attention import interface
from cohort.models.host_memory import MasterWeights
from cohort.models.lm_head import tiled_softmax
from cohort.packing import collate
from cohort.packing.to_device import to_device
from cohort.records import TrainSequence
from comparisons import Check, attempt
from harness import ModelShape, SkippedError, forward_backward, grpo, make_engine, make_group

EXACT = 1e-4  # relative error of float32, summed in another order
PLAIN = 0.1  # relative error of a gradient in bfloat16 that others are compared with
ROUNDED = 1.5  # times the error of the plain way in bfloat16
ROUNDED_ONCE = 2**-8  # relative error of a number that is rounded to bfloat16
STEP_SIZE = 1e-5  # of AdamW in the one step that is compared
LEAST_FALL = 1e-3  # of the loss in it
# Of the loss before the step as a share of its fall, of the gradient's norm, of the loss after the step
STEP_LIMITS = {torch.float32: (1e-3, 1e-4, 1e-2), torch.bfloat16: (0.1, 0.05, 0.2)}
LENGTHS = tuple(range(37, 37 + 40 * 53, 53))  # 40 numbers of tokens
DEFAULT = "by default"  # the backend that the library chooses
HEAD = ("logprobs", "gradient of hidden", "gradient of weight")
STEP = ("loss before", "norm of the gradient", "loss after")
Gradients = dict[str, Tensor]


def kernels(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Matrix products with a float32 result, and the head with every way through a tile of logits."""
    return _rows(_products(device), _head(device, tiny))


def attention(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Gradients of a model with every backend of attention."""
    return _rows(_attention(device, tiny))


def budgets(device: torch.device, tiny: bool) -> dict[str, Any]:
    """The gradient of two groups under several token budgets."""
    return _rows(_budgets(device, tiny))


def offload(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Updates on the host, by gradients of the device."""
    return _rows(_offload(device, tiny))


def one_step(device: torch.device, tiny: bool) -> dict[str, Any]:
    """A training step of a small model: the loss before and after it."""
    return _rows(_one_step(device, tiny))


def sharding(device: torch.device, tiny: bool) -> dict[str, Any]:
    """The same step with FSDP2 over this process alone, weights on the device and on the host."""
    return _rows(_sharding(device, tiny))


def compilations(device: torch.device, tiny: bool) -> dict[str, Any]:
    """How many variants of the head's Triton kernels are compiled for rows of many lengths.

    Triton compiles anew for the divisibility of sizes and addresses, but must not for every size.

    Raises:
        SkippedError: there is no GPU.
    """
    if device.type == "cpu":
        raise SkippedError("needs CUDA")
    from cohort.models.lm_head import triton_kernels

    weight = torch.randn(20_000, 256, device=device, dtype=torch.bfloat16)
    for tokens in LENGTHS:
        hidden = torch.randn(tokens, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, len(weight), (tokens,), device=device)
        logprobs, _ = linear_logprobs(Operands(hidden, weight), targets, tile_elements=1 << 22)
        logprobs.sum().backward()
    kernels = {name: kernel for name, kernel in vars(triton_kernels).items() if hasattr(kernel, "device_caches")}
    variants = {name: sum(len(c[0]) for c in kernel.device_caches.values()) for name, kernel in kernels.items()}
    checks = [Check(name=f"variants of {name}", error=n, limit=len(LENGTHS) / 2) for name, n in variants.items()]
    checks.append(Check(name="no kernel was compiled", error=float(not any(variants.values())), limit=0.0))
    return {"checks": [check.row() for check in checks], "measured": variants}


def _rows(*checks: Iterator[Check]) -> dict[str, Any]:
    return {"checks": [check.row() for check in itertools.chain(*checks)]}


def _products(device: torch.device) -> Iterator[Check]:
    """bfloat16 factors and a float32 product."""
    if device.type != "cuda":
        return
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(512, 512, device=device, generator=generator).bfloat16() for _ in range(2))
    yield from attempt(
        "torch.mm, out_dtype float32",
        {"product": 1e-5},
        lambda: {"product": _error(torch.mm(a, b, out_dtype=torch.float32), a.double() @ b.double())},
    )


def _offload(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Three updates, and the time of the last one."""
    width, layers = (64, 3) if tiny else (4096, 16)
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(width, width, bias=n % 2 == 0) for n in range(layers)))
    moved = copy.deepcopy(plain).to(device)
    masters = MasterWeights(moved, torch.float32)
    optimizers = [Optimizers(plain, AdamwConfig()), Optimizers(moved, AdamwConfig(), master_weights=masters)]
    seconds = 0.0
    for _ in range(3):
        for here, there in zip(plain.parameters(), moved.parameters(), strict=True):
            here.grad = torch.randn(here.shape, generator=generator)
            there.grad = here.grad.to(device)
        for optimizer in optimizers:
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step(1e-3)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    error = max(_error(a, e) for a, e in zip(moved.parameters(), plain.parameters(), strict=True))
    moved_bytes = 8 * sum(p.numel() for p in plain.parameters())  # a gradient and a weight of float32 each
    note = f"{moved_bytes / 1e9:.2f} GB over the bus in {seconds:.3f} s"
    yield Check(name="optim.offload: three updates of AdamW", error=error, limit=1e-7, note=note)


def _head(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Logprobs and gradients of the head in several tiles."""
    tokens, vocab, hidden = (60, 500, 32) if tiny else (1500, 20_000, 512)
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, hidden, generator=generator) * s for n, s in ((tokens, 1.0), (vocab, 0.2)))
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)

    def outcome(x: Tensor, w: Tensor, dtype: torch.dtype, *, in_forward: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        x, w = (t.to(dtype).detach().requires_grad_() for t in (x, w))
        y, f, size = targets.to(x.device), factors.to(x.device), tokens * vocab // 5
        if in_forward:
            loss, logprobs = linear_loss(Operands(x, w), y, lambda lp, _, span: lp * f[span], tile_elements=size)
        else:
            logprobs, _ = linear_logprobs(Operands(x, w), y, tile_elements=size)
            loss = (logprobs * f).sum()
        loss.backward()
        return logprobs.detach(), x.grad, w.grad

    for dtype in _dtypes(device):
        x, w = states.to(dtype), weight.to(dtype)
        expected = outcome(x, w, torch.float64)
        rounded = EXACT if dtype == torch.float32 else ROUNDED_ONCE
        limits = dict(zip(HEAD, (EXACT, rounded, rounded), strict=True))
        for (kernel, choose), in_forward in itertools.product(_folds(device).items(), (False, True)):
            name = f"head, {kernel}, {_name(dtype)}{', gradients in forward' if in_forward else ''}"
            compute = partial(outcome, x.to(device), w.to(device), dtype, in_forward=in_forward)
            yield from attempt(name, limits, partial(_head_errors, choose, compute, expected))


def _head_errors(
    choose: Callable[[], AbstractContextManager[None]],
    compute: Callable[[], tuple[Tensor, Tensor, Tensor]],
    expected: tuple[Tensor, Tensor, Tensor],
) -> dict[str, float]:
    """The largest of a logprob, and relative ones of gradients."""
    with choose():
        logprobs, *gradients = compute()
    worst = (logprobs.cpu() - expected[0]).abs().max().item()
    errors = [_error(a, e) for a, e in zip(gradients, expected[1:], strict=True)]
    return dict(zip(HEAD, (worst, *errors), strict=True))


def _folds(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """What goes through a tile of logits: kernels of Triton on GPUs, PyTorch."""

    @contextmanager
    def with_triton() -> Iterator[None]:
        from cohort.models.lm_head import triton_kernels

        with patch.object(triton_kernels, "update_softmax", wraps=triton_kernels.update_softmax) as update_softmax:
            yield
        if not update_softmax.called:
            raise RuntimeError("PyTorch has taken the place of Triton's kernels")

    @contextmanager
    def without_triton() -> Iterator[None]:
        with patch.object(tiled_softmax, "use_triton", False):
            yield

    plain: dict[str, Callable[[], AbstractContextManager[None]]] = {"PyTorch": without_triton}
    return plain | ({"Triton": with_triton} if device.type == "cuda" else {})


def _attention(device: torch.device, tiny: bool) -> Iterator[Check]:
    """In float32 and in bfloat16, with full attention and with windows in every other layer."""
    for window in (None, 6 if tiny else 100):
        yield from _attention_of(device, tiny, window)


def _attention_of(device: torch.device, tiny: bool, window: int | None) -> Iterator[Check]:
    model, sequences = model_and_sequences(tiny, window)
    name_of_window = "" if window is None else f", windows of {window}"
    truth = _plain_gradients(copy.deepcopy(model).double(), sequences)
    model.to(device)
    for compute in _dtypes(device):
        limit = EXACT
        if compute == torch.bfloat16:
            plain = _distance(_plain_gradients(model, sequences, "sdpa"), truth)
            title = f"full logits, bfloat16{name_of_window}: gradient"
            yield Check(name=title, error=plain, limit=PLAIN, note="the plain way")
            limit = ROUNDED * plain
        policy = Policy(model, device=device, compute_dtype=compute, pad_token_id=0)
        for name, choose in _backends().items():
            title = f"{policy.layout}, attention {name}, {_name(compute)}{name_of_window}"
            wrong_device = _is_for_others(name, compute, device)
            if wrong_device:
                yield Check(name=title, error=None, limit=limit, note=wrong_device, left_out=True)
                continue

            def compare(
                policy: Policy = policy, choose: Callable[[], AbstractContextManager[None]] = choose
            ) -> dict[str, float]:
                policy.model.zero_grad(set_to_none=True)
                with choose():
                    return {"gradient": _distance(_gradients(policy, sequences), truth)}

            yield from attempt(title, {"gradient": limit}, compare)
    if window is None:
        yield from _flash_attention(model, sequences, truth, limit)


def _is_for_others(backend: str, compute: torch.dtype, device: torch.device) -> str:
    """Why a backend of attention does not run here; empty where it does."""
    if device.type == "cpu" and backend == "varlen":
        return "needs a GPU"
    if backend == "varlen" and compute == torch.float32:
        return "needs 16 bits"
    if backend == "varlen" and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0"
    return ""


def _flash_attention(model: Any, sequences: list[TrainSequence], truth: Gradients, limit: float) -> Iterator[Check]:
    """The plain way with the package flash-attn, as other trainers run."""
    title = "full logits, flash-attn, bfloat16"
    is_missing = importlib.util.find_spec("flash_attn") is None
    if is_missing or model.device.type == "cpu":
        why = "flash-attn is not installed" if is_missing else "needs a GPU"
        yield Check(name=title, error=None, limit=limit, note=why, left_out=True)
        return
    yield from attempt(
        title,
        {"gradient": limit},
        lambda: {"gradient": _distance(_plain_gradients(model, sequences, "flash_attention_2"), truth)},
    )


def _backends() -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The library's choice, and each that can be chosen."""
    chosen: dict[str, Callable[[], AbstractContextManager[None]]] = {DEFAULT: nullcontext}
    return chosen | {name: lambda name=name: interface.backend(name) for name in get_args(interface.Backend)}


def _budgets(device: torch.device, tiny: bool) -> Iterator[Check]:
    """All tokens at once, about half of them, and one completion at a time, which splits groups."""
    model, sequences = model_and_sequences(tiny)
    plain = _plain_gradients(copy.deepcopy(model).double(), sequences)
    truth = {name: -gradient for name, gradient in plain.items()}  # a loss falls where logprobs rise
    model.to(device)
    half = sum(len(s.token_ids) for s in sequences) // 2
    for compute in _dtypes(device):
        policy = Policy(model, device=device, compute_dtype=compute, pad_token_id=0)
        at_once = _engine_gradients(policy, sequences, 1 << 20)
        error = _distance(at_once, truth)
        most, limit = (EXACT, EXACT) if compute == torch.float32 else (PLAIN, ROUNDED * error)
        dtype = _name(compute)
        yield Check(name=f"everything in one micro-batch, {dtype}: gradient", error=error, limit=most)
        for budget in (half, 1):
            yield from attempt(
                f"a budget of {budget} tokens, {dtype}",
                {"gradient": limit},
                lambda policy=policy, budget=budget: {
                    "gradient": _distance(_engine_gradients(policy, sequences, budget), truth)
                },
            )


def _one_step(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Against the same step in float64 on the CPU: errors of losses are shares of the fall that it has there."""
    model, sequences = model_and_sequences(tiny)
    reference = copy.deepcopy(model).double()
    expected = _losses(reference, torch.device("cpu"), None, sequences)
    fall = expected[0] - expected[2]
    yield Check(name="one step in float64: loss after it", error=expected[2], limit=expected[0] - LEAST_FALL)
    for compute in _dtypes(device):

        def compare(compute: torch.dtype = compute) -> dict[str, float]:
            actual = _losses(copy.deepcopy(model).to(device), device, compute, sequences)
            scales = (fall, expected[1], fall)
            errors = [abs(a - e) / scale for a, e, scale in zip(actual, expected, scales, strict=True)]
            return dict(zip(STEP, errors, strict=True))

        yield from attempt(f"one step, {_name(compute)}", dict(zip(STEP, STEP_LIMITS[compute], strict=True)), compare)


def _sharding(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Against the step without sharding: in bfloat16 the two round differently (docs/gpu.md)."""
    model, sequences = model_and_sequences(tiny)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for compute, on_host in itertools.product(_dtypes(device), (False, True)):
            dtype = _name(compute)
            config = ModelConfig(path=folder, compute_dtype=dtype, parameter_offload=on_host)
            load = partial(_load_request, config, device)

            def compare(load: Callable[[type[LoadRequest]], Policy] = load) -> dict[str, float]:
                expected = _losses_of(load(_PlainRequest), sequences)
                actual = _losses_of(load(_ShardedRequest), sequences)
                scales = (expected[0] - expected[2], expected[1], expected[0] - expected[2])
                errors = [abs(a - e) / scale for a, e, scale in zip(actual, expected, scales, strict=True)]
                return dict(zip(STEP, errors, strict=True))

            title = f"one step, FSDP2{' with parameter_offload' if on_host else ''}, {dtype}"
            yield from attempt(title, dict(zip(STEP, STEP_LIMITS[compute], strict=True)), compare)


class _ShardedRequest(LoadRequest):
    is_sharded = True


class _PlainRequest(LoadRequest):
    is_sharded = False


def _load_request(config: ModelConfig, device: torch.device, kind: type[LoadRequest]) -> Policy:
    policy = load_policy(kind(config, device=device, tokenizer=SimpleNamespace(pad_token_id=0)))
    assert (policy.sharding is not None) == kind.is_sharded
    return policy


def _losses(
    model: Any, device: torch.device, compute: torch.dtype | None, sequences: list[TrainSequence]
) -> tuple[float, float, float]:
    """The loss, the gradient's norm, and the loss of the same step's second pass, after an update."""
    return _losses_of(Policy(model, device=device, compute_dtype=compute, pad_token_id=0), sequences)


def _losses_of(policy: Policy, sequences: list[TrainSequence]) -> tuple[float, float, float]:
    engine = make_engine(policy, micro_batch_tokens=1 << 20, learning_rate=STEP_SIZE)
    before = forward_backward(engine, sequences).metrics["loss"]
    norm = engine.optim_step().grad_norm
    return before, norm, engine.forward_backward(None, grpo()).metrics["loss"]


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Of the products."""
    return (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)


def _engine_gradients(policy: Policy, sequences: list[TrainSequence], budget: int) -> Gradients:
    forward_backward(make_engine(policy, micro_batch_tokens=budget), sequences)
    return _taken(policy.model)


def model_and_sequences(tiny: bool, window: int | None = None) -> tuple[Any, list[TrainSequence]]:
    """A small model, whose every other layer may have a window, and two groups with completions down to one token."""
    shape = ModelShape(hidden=128, layers=2 if tiny else 4, intermediate=256, vocab=512 if tiny else 4096)
    torch.manual_seed(0)
    config = shape.config()
    if window is not None:
        config.sliding_window, config.layer_types = (
            window,
            ["sliding_attention", "full_attention"] * (shape.layers // 2),
        )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # as they come all distributions are nearly uniform
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    sizes = [(9, [1, 5, 3]), (300, [7, 12, 1])] if tiny else [(70, [1, 5, 33, 130]), (600, [64, 100, 17])]
    sequences = []
    for group, (prompt, completions) in enumerate(sizes):
        for s in make_group(prompt, completions, shape.vocab):
            sequences.append(replace(s, group=group, index=len(sequences), trajectory=len(sequences)))
    return model, sequences


def _plain_gradients(model: Any, sequences: list[TrainSequence], implementation: str | None = None) -> Gradients:
    """One unpadded forward pass and one backward pass per completion.

    Args:
        model: whose weights.
        sequences: of the gradient.
        implementation: of attention in the library, under which products are in bfloat16; None: as the model is.
    """
    model.zero_grad(set_to_none=True)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    rounds = implementation is not None
    for s in sequences:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=rounds):
            logprobs = _plain_logprobs(model, s)
        (logprobs * torch.from_numpy(s.loss_weights * s.advantages).to(logprobs)).sum().backward()
    return _taken(model)


def _plain_logprobs(model: Any, sequence: TrainSequence) -> Tensor:
    """Of a completion's tokens, from full logits of one unpadded row."""
    ids = torch.from_numpy(sequence.token_ids).long().unsqueeze(0).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, sequence.shared_prefix_tokens - 1 : -1]
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(-1, ids[0, sequence.shared_prefix_tokens :].unsqueeze(-1)).squeeze(-1)


def _gradients(policy: Policy, sequences: list[TrainSequence]) -> Gradients:
    """The same from `Policy.logprobs`, all in one micro-batch."""
    micro_batch = to_device(collate(sequences, share_prompts=policy.shares_prompts), policy.device, torch.float32)
    logprobs, _ = policy.logprobs(micro_batch, temperature=1.0)
    (logprobs * micro_batch.loss_weights * micro_batch.advantages).sum().backward()
    return _taken(policy.model)


def _taken(model: Any) -> Gradients:
    """A copy of every gradient in float64 on the CPU, which is then cleared."""
    gradients = {name: p.grad.detach().double().cpu() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def _distance(actual: Gradients, expected: Gradients) -> float:
    """Relative error of all gradients as one vector."""
    errors = [(actual[name] - e).norm().item() for name, e in expected.items()]
    return float(np.linalg.norm(errors) / np.linalg.norm([e.norm().item() for e in expected.values()]))


def _error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
