"""Whether what is fast on a GPU computes what is plain: attention, head, matrix products, streamed groups.

Each check compares with a computation in float64 on the CPU: one unpadded forward pass per completion and its full
logits. Where a product rounds to bfloat16, the plain way in bfloat16 is measured too, and is the limit.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cohort.config import AdamwConfig
from cohort.engine.optimizer import Optimizers
from cohort.packing import collate
from cohort.policy import Policy, linear_logprobs, linear_loss, logit_tiles
from cohort.policy.attention import interface
from cohort.policy.masters import Masters
from cohort.records import TrainSequence
from harness import ModelShape, forward_backward, make_engine, make_group

EXACT = 1e-4  # relative error of float32, summed in another order
ROUNDED = 1.5  # times the error of the plain way in bfloat16
ROUNDED_ONCE = 2**-8  # relative error of a number that is rounded to bfloat16
DEFAULT = "by default"  # the backend that the library chooses
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    error: float | None  # None: it could not be made
    limit: float
    note: str = ""
    may_be_missing: bool = False  # where this device or dtype is none that it is for

    @property
    def passed(self) -> bool:
        """Whether the error is within its limit."""
        return self.may_be_missing if self.error is None else self.error <= self.limit


def run_checks(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Every check, as JSON. Those of bfloat16 and of kernels that only GPUs have are left out on a CPU."""
    parts = (_products(device), _head(device, tiny), _attention(device, tiny), _stream(device, tiny))
    checks = [check for part in (*parts, _offload(device, tiny)) for check in part]
    return {"checks": [asdict(check) | {"passed": check.passed} for check in checks]}


def _products(device: torch.device) -> Iterator[Check]:
    """bfloat16 factors and a float32 product."""
    if device.type != "cuda":
        return
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(512, 512, device=device, generator=generator).bfloat16() for _ in range(2))
    product = torch.mm(a, b, out_dtype=torch.float32)
    yield Check(name="torch.mm, out_dtype float32", error=_error(product, a.double() @ b.double()), limit=1e-5)


def _offload(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Updates on the host, by gradients of the device: three, and the time of the last one."""
    width, layers = (64, 3) if tiny else (4096, 16)
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(width, width, bias=n % 2 == 0) for n in range(layers)))
    moved = copy.deepcopy(plain).to(device)
    masters = Masters(moved, torch.float32)
    optimizers = [Optimizers(plain, AdamwConfig()), Optimizers(moved, AdamwConfig(), masters=masters)]
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
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, hidden, generator=generator) * s for n, s in ((tokens, 1.0), (vocab, 0.2)))
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)

    def outcome(x: Tensor, w: Tensor, dtype: torch.dtype, *, in_forward: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        x, w = (t.to(dtype).detach().requires_grad_() for t in (x, w))
        y, f, size = targets.to(x.device), factors.to(x.device), tokens * vocab // 5
        if in_forward:
            loss, logprobs, _ = linear_loss(x, w, y, lambda lp, _, span: lp * f[span], tile_elements=size)
        else:
            logprobs, _ = linear_logprobs(x, w, y, tile_elements=size)
            loss = (logprobs * f).sum()
        loss.backward()
        return logprobs.detach(), x.grad, w.grad

    for dtype in dtypes:
        x, w = states.to(dtype), weight.to(dtype)
        expected = outcome(x, w, torch.float64)
        for (kernel, choose), in_forward in itertools.product(_folds(device).items(), (False, True)):
            with choose():
                actual = outcome(x.to(device), w.to(device), dtype, in_forward=in_forward)
            name = f"head, {kernel}, {_name(dtype)}{', gradients in forward' if in_forward else ''}"
            worst = (actual[0].cpu() - expected[0]).abs().max().item()
            yield Check(name=f"{name}: logprobs", error=worst, limit=EXACT)
            limit = EXACT if dtype == torch.float32 else ROUNDED_ONCE
            for gradient, a, e in zip(("hidden", "weight"), actual[1:], expected[1:], strict=True):
                yield Check(name=f"{name}: gradient of {gradient}", error=_error(a, e), limit=limit)


def _folds(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """What goes through a tile of logits: kernels of Triton where there are any, PyTorch."""

    @contextmanager
    def without_triton() -> Iterator[None]:
        logit_tiles.use_triton = False
        try:
            yield
        finally:
            logit_tiles.use_triton = True

    both: dict[str, Callable[[], AbstractContextManager[None]]] = {"Triton": nullcontext, "PyTorch": without_triton}
    return both if device.type == "cuda" else {"PyTorch": without_triton}


def _attention(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Gradients of all weights with each backend of attention, in float32 and in bfloat16."""
    model, sequences = _model_and_sequences(tiny)
    truth = _plain_gradients(copy.deepcopy(model).double(), sequences)
    model.to(device)
    for compute in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16):
        limit = EXACT
        if compute == torch.bfloat16:
            model.set_attn_implementation("sdpa")
            with torch.autocast(device.type, dtype=compute):
                plain = _distance(_plain_gradients(model, sequences), truth)
            yield Check(name="full logits, bfloat16: gradient", error=plain, limit=math.inf, note="the plain way")
            limit = ROUNDED * plain
        policy = Policy(model, device=device, compute_dtype=compute, pad_token_id=0)
        for name, choose in _backends().items():
            title = f"{policy.layout}, attention {name}, {_name(compute)}: gradient"
            try:
                with choose():
                    error = _distance(_gradients(policy, sequences), truth)
            except (ValueError, RuntimeError, NotImplementedError) as reason:
                model.zero_grad(set_to_none=True)
                note = f"cannot: {str(reason).splitlines()[0][:100]}"
                # kernels of GPUs on a CPU, and the one for 16 bits in float32
                for_others = device.type == "cpu" or (name == "varlen" and compute == torch.float32)
                missing = for_others and name not in (DEFAULT, "cascade")
                yield Check(name=title, error=None, limit=limit, note=note, may_be_missing=missing)
            else:
                yield Check(name=title, error=error, limit=limit)


def _backends() -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The library's choice, and each that can be chosen."""
    chosen: dict[str, Callable[[], AbstractContextManager[None]]] = {DEFAULT: nullcontext}
    return chosen | {name: lambda name=name: interface.backend(name) for name in get_args(interface.Backend)}


def _stream(device: torch.device, tiny: bool) -> Iterator[Check]:
    """A group in parts of one completion, and at once."""
    model, sequences = _model_and_sequences(tiny)
    plain = _plain_gradients(copy.deepcopy(model).double(), sequences)
    truth = {name: -gradient for name, gradient in plain.items()}  # a loss falls where logprobs rise
    model.to(device)
    for compute in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16):
        policy = Policy(model, device=device, compute_dtype=compute, pad_token_id=0)
        at_once, in_parts = (_engine_gradients(policy, sequences, budget) for budget in (1 << 20, 1))
        limit = EXACT if compute == torch.float32 else ROUNDED * _distance(at_once, truth)
        error = _distance(in_parts, truth)
        yield Check(name=f"a group in parts, {_name(compute)}: gradient", error=error, limit=limit)


def _engine_gradients(policy: Policy, sequences: list[TrainSequence], budget: int) -> Gradients:
    forward_backward(make_engine(policy, micro_batch_tokens=budget), sequences)
    return _taken(policy.model)


def _model_and_sequences(tiny: bool) -> tuple[Any, list[TrainSequence]]:
    """A small model, and two groups with completions down to one token."""
    shape = ModelShape(hidden=128, layers=2 if tiny else 4, intermediate=256, vocab=512 if tiny else 4096)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    with torch.no_grad():  # as they come all distributions are nearly uniform
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    sizes = [(9, [1, 5, 3]), (300, [7, 12, 1])] if tiny else [(70, [1, 5, 33, 130]), (600, [64, 100, 17])]
    sequences = []
    for group, (prompt, completions) in enumerate(sizes):
        for s in make_group(prompt, completions, shape.vocab):
            fields = {f: getattr(s, f) for f in s.__slots__} | {"group": group, "index": len(sequences)}
            sequences.append(TrainSequence(**fields))
    return model, sequences


def _plain_gradients(model: Any, sequences: list[TrainSequence]) -> Gradients:
    """One unpadded forward pass and one backward pass per completion."""
    for s in sequences:
        ids = torch.from_numpy(s.token_ids).unsqueeze(0).to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, s.num_prompt_tokens - 1 : -1]
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        weights = torch.from_numpy(s.loss_weights * s.advantages).to(log_p)
        (log_p.gather(-1, ids[0, s.num_prompt_tokens :].unsqueeze(-1)).squeeze(-1) * weights).sum().backward()
    return _taken(model)


def _gradients(policy: Policy, sequences: list[TrainSequence]) -> Gradients:
    """The same from `Policy.logprobs`, all in one micro-batch."""
    micro_batch = collate(sequences, share_prompts=policy.shares_prompts).to(policy.device, torch.float32)
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
