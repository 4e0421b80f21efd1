"""Optimizers of torch and torchao, their parameter groups, the learning-rate schedule, and stochastic rounding.

Rounding to nearest loses every update that is smaller than half the distance between adjacent bfloat16 numbers, which
is 0.2 to 0.4 % of a weight. The random bits are a hash of (seed, update, weight, element), so they do not depend on
the device, the number of ranks or where a run was resumed.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from cohort.config import (
    AdafactorConfig,
    Adamw8bitConfig,
    AdamwConfig,
    CustomOptimConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from cohort.config.optim import StochasticRoundingConfig
from cohort.errors import UserError
from cohort.learner.custom_optimizer import CustomOptimizer, set_learning_rate
from cohort.learner.optimizer_offload import OffloadedUpdates, to_local
from cohort.models.fsdp import local_rows
from cohort.models.host_memory import MasterWeights
from cohort.plan.state_memory import check_optimizer_sharding, state_bytes


def learning_rate_factor(
    updates_done: int,
    *,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"],
    minimum: float = 0.0,
) -> float:
    """Return the next update's factor of the peak learning rate: linear warmup, then constant or decay to `minimum`.

    Args:
        updates_done: optimizer steps done before this one.
        warmup: warmup steps; the first has factor 1 / warmup.
        total: total optimizer steps of the run.
        schedule: schedule after the warmup.
        minimum: where the linear and the cosine schedule end, after all updates.
    """
    if updates_done < warmup:
        return (updates_done + 1) / warmup
    progress = (updates_done - warmup) / max(1, total - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - minimum) * progress
        case "cosine":
            return minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))


_BLOCK = 1 << 24  # elements at a time; each takes 8 bytes of temporary memory
_MASK = 0xFFFFFFFF


def rounding_key(seed: int, update: int, name: str) -> int:
    """Derive the key of the random bits of one weight in one update."""
    return int(np.random.SeedSequence((seed, update, zlib.crc32(name.encode()))).generate_state(1)[0])


def round_stochastically(wide: Tensor, into: Tensor, *, key: int, first: int = 0) -> None:
    """Round `wide` (float32) into `into` (bfloat16), each number to one of its two neighbors.

    Args:
        wide: values of any shape.
        into: destination of the same shape.
        key: key of the random bits.
        first: index of the first element in the full weight, of which this may be a shard.
    """
    flat, out = wide.contiguous().view(-1), into.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].view(torch.int32)
        noise = _hash(torch.arange(first + start, first + start + len(bits), device=wide.device), key) & 0xFFFF
        # bfloat16 drops the low 16 bits: random bits added to them carry with a probability proportional to their value
        rounded = (bits + noise.to(torch.int32)) & ~0xFFFF
        out[start : start + _BLOCK] = rounded.view(torch.float32).to(torch.bfloat16)


def _hash(numbers: Tensor, key: int) -> Tensor:
    """Hash each int64 to 32 bits by rounds of xor-shift and multiply (lowbias32, C. Wellons, "hash-prospector")."""
    x = (numbers * 0x9E3779B9 + key) & _MASK  # spreads adjacent numbers; products may overflow, low bits are exact
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


ParamGroup = dict[str, Any]  # of a torch optimizer


def check_optimizer(config: OptimConfig, dp_size: int) -> None:
    """Check the optimizer before any weights are loaded.

    Args:
        config: the `optim` section.
        dp_size: number of data-parallel ranks, over which weights are sharded.

    Raises:
        UserError: the optimizer is not installed, or does not support sharded weights.
    """
    if config.name == "adamw_8bit" and find_spec("torchao") is None:
        raise UserError(
            "optim.name: adamw_8bit requires torchao, which is not installed; install cohort-rl[torchao], or use adamw"
        )
    check_optimizer_sharding(config, dp_size)


def check_weights(config: OptimConfig, weights: Mapping[str, Tensor]) -> None:
    """Check the `optim` section against the weights to train, which may be on the meta device.

    Raises:
        UserError: a group matches no weight, or a key has no effect on their dtype.
    """
    _param_groups(config, weights)
    if isinstance(config, StochasticRoundingConfig) and config.stochastic_rounding:
        dtypes = {p.dtype for p in weights.values()}
        if torch.bfloat16 not in dtypes:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UserError(
                f"optim.stochastic_rounding: true has no effect on {names} weights, which keep small updates; remove "
                f"it. It is for weights trained in bfloat16"
            )


class Optimizers:
    """Wrapper of one or two torch optimizers that behaves like a single one."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, master_weights: MasterWeights | None = None, seed: int = 0
    ):
        """Create the optimizers of the trainable weights of `model`.

        Args:
            model: the model; its weights may be sharded.
            config: the `optim` section.
            master_weights: master weights to update instead of the model's weights.
            seed: seed of stochastic rounding.

        Raises:
            UserError: a group matches no weight, or the optimizer is not installed or does not support the weights.
        """
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tables = _embedding_and_head_weights(model)
        self._trained = list(named.values())
        self._wide_gradients: list[Tensor] = []  # weights whose gradients are wider than themselves
        self._offload: OffloadedUpdates | None = None
        if master_weights is not None:
            not_hidden = {name for name, p in named.items() if id(p) in tables}
            self._offload = OffloadedUpdates([(parameter, master) for _, parameter, master in master_weights.pairs()])
            model, named = master_weights.tree, {name: master for name, _, master in master_weights.pairs()}
            tables = {id(named[name]) for name in not_hidden}
        else:
            self._wide_gradients = [p for p in self._trained if p.grad_dtype != p.dtype]
        self._model, self._config, self._seed = model, config, seed
        self._named = named
        self._rounds = isinstance(config, StochasticRoundingConfig) and config.stochastic_rounding
        self.custom = CustomOptimizer(config, named) if isinstance(config, CustomOptimConfig) else None
        if self.custom is not None:
            self._optimizers: tuple[torch.optim.Optimizer, ...] = (self.custom.optimizer,)
        else:
            self._optimizers = _build(config, _param_groups(config, named), tables)
            self._lr_factors = [[group.pop("factor") for group in o.param_groups] for o in self._optimizers]

    @property
    def first(self) -> torch.optim.Optimizer:
        """The only optimizer of torch, or the first one."""
        return self._optimizers[0]

    def set_learning_rate(self, learning_rate: float) -> float:
        """Set the learning rate of the next step.

        Args:
            learning_rate: of weights with factor 1; with an optimizer of the user's own, the schedule's factor.

        Returns:
            The learning rate of the first parameter group.
        """
        if self.custom is not None:
            return self.custom.set_learning_rates(learning_rate)
        for optimizer, factors in zip(self._optimizers, self._lr_factors, strict=True):
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                set_learning_rate(group, learning_rate * factor)
        return learning_rate

    def step(self, learning_rate: float, *, update: int = 0) -> None:
        """Update the weights and clear their gradients.

        Args:
            learning_rate: learning rate of weights with factor 1.
            update: number of updates done, which stochastic rounding depends on.
        """
        self.set_learning_rate(learning_rate)
        if self._offload is not None:
            owners = self._owners()
            self._offload.run(lambda master: _step_parameter(*owners[id(master)], master))
        elif self._rounds:
            self._step_rounded(update)
        else:
            with self._round_gradients():
                for optimizer in self._optimizers:
                    optimizer.step()
        for parameter in self._trained:
            parameter.grad = None

    @contextmanager
    def _round_gradients(self) -> Iterator[None]:
        """Context for torch's optimizers, which need gradients in the dtype of the weights. Clears these gradients."""
        dtypes = [p.grad_dtype for p in self._wide_gradients]
        for p in self._wide_gradients:
            gradient, p.grad = p.grad, None
            p.grad_dtype = p.dtype
            if gradient is not None:
                p.grad = gradient.to(p.dtype)
        try:
            yield
        finally:
            for p, dtype in zip(self._wide_gradients, dtypes, strict=True):
                p.grad = None
                p.grad_dtype = dtype

    def _owners(self) -> dict[int, tuple[torch.optim.Optimizer, ParamGroup]]:
        """Return the optimizer and the parameter group of each weight, by its id."""
        return {
            id(p): (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    @torch.no_grad()
    def _step_rounded(self, update: int) -> None:
        """Update bfloat16 weights one by one in float32, with float32 state, and round them stochastically."""
        owners = self._owners()
        for name, parameter in self._named.items():
            assert parameter.grad is not None, "every weight has a gradient when it is updated"
            optimizer, group = owners[id(parameter)]
            wide = parameter.detach().float()
            wide.grad = parameter.grad.float()
            if parameter in optimizer.state:
                optimizer.state[wide] = optimizer.state.pop(parameter)
            _step_parameter(optimizer, group, wide)
            if wide in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(wide)
            own, first_row = local_rows(parameter)
            first = first_row * own[:1].numel()
            round_stochastically(to_local(wide), own, key=rounding_key(self._seed, update, name), first=first)

    def state_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state after the first step."""
        return sum(
            state_bytes(self._config, own.shape, own.element_size(), by_muon=isinstance(optimizer, torch.optim.Muon))
            for optimizer in self._optimizers
            for own in (to_local(p) for group in optimizer.param_groups for p in group["params"])
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state by weight name, as torch.distributed.checkpoint saves it. Call it between steps."""
        self._init_float32_state()
        keeping = nullcontext() if self.custom is None else self.custom.keeping_weights()
        with keeping, self._round_gradients():  # torch may create missing state by a step with zero gradients
            state = get_optimizer_state_dict(self._model, self._optimizers)
        return state if self.custom is None else {**state, "custom": self.custom.record()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._init_float32_state()
        keeping = nullcontext() if self.custom is None else self.custom.keeping_weights()
        of_torch = {key: state[key] for key in ("state", "param_groups")}
        with keeping, self._round_gradients():
            set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=of_torch)
        if self._rounds or self.custom is not None:  # torch has cast it to the dtype of the weights
            owners = self._owners()
            for name, own in state["state"].items():
                wide = {key: x for key, x in own.items() if isinstance(x, Tensor)}
                owners[id(self._named[name])][0].state[self._named[name]].update(wide)
        if self.custom is not None:
            self.custom.restore(state["custom"])

    def _init_float32_state(self) -> None:
        """Create float32 state for stochastic rounding, by a step that changes nothing.

        Otherwise torch creates it the same way, but in bfloat16.
        """
        if self._rounds and not any(optimizer.state for optimizer in self._optimizers):
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self.step(0.0)


def _step_parameter(optimizer: torch.optim.Optimizer, group: ParamGroup, parameter: Tensor) -> None:
    """Update a single weight with the hyperparameters of its group."""
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def _embedding_and_head_weights(model: nn.Module) -> set[int]:
    """Return the ids of embedding and head weights, those of adapters included: Muon is for hidden layers only."""
    found = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    found += [getattr(model, "value_head", None), *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    return {id(p) for module in found if isinstance(module, nn.Module) for p in module.parameters()}


def _param_groups(config: OptimConfig, named: Mapping[str, Tensor]) -> list[ParamGroup]:
    """Group weights by weight decay and learning-rate factor."""
    groups: dict[tuple[float, float], ParamGroup] = {}
    unmatched = {group.match for group in config.groups}
    for name, parameter in named.items():
        decay, factor = config.weight_decay if parameter.ndim >= 2 else 0.0, 1.0
        for own in config.groups:
            if fnmatchcase(name, own.match):
                unmatched.discard(own.match)
                factor = own.learning_rate_factor
                decay = decay if own.weight_decay is None else own.weight_decay
                break
        group = groups.setdefault((decay, factor), {"params": [], "weight_decay": decay, "factor": factor})
        group["params"].append(parameter)
    for pattern in unmatched:
        near = get_close_matches(pattern, named, n=3, cutoff=0.3)
        raise UserError(
            f"optim.groups: match: {pattern!r} matches no trained weight, or earlier groups match them all; similar "
            f"names: {', '.join(near or list(named)[:3])}"
        )
    return list(groups.values())


def _build(config: OptimConfig, groups: list[ParamGroup], not_hidden: set[int]) -> tuple[torch.optim.Optimizer, ...]:
    match config:
        case CustomOptimConfig():
            raise AssertionError("made by CustomOptimizer")
        case AdamwConfig():
            return (_adamw(config, groups),)
        case Adamw8bitConfig():
            return (_adamw_8bit(config, groups),)
        case AdafactorConfig():
            decay, threshold = config.beta2_decay, config.clip_threshold
            return (torch.optim.Adafactor(groups, beta2_decay=decay, d=threshold, foreach=False),)
        case SgdConfig():
            return (torch.optim.SGD(groups, momentum=config.momentum),)
        case MuonConfig():
            matrices, rest = _split(groups, lambda p: p.ndim == 2 and id(p) not in not_hidden)
            built: list[torch.optim.Optimizer] = []
            if matrices:
                built.append(torch.optim.Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
            if rest:
                built.append(_adamw(config, rest))
            return tuple(built)


def _adamw(config: AdamwConfig | MuonConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    device = groups[0]["params"][0].device
    return torch.optim.AdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.type in ("cpu", "cuda"),
    )


def _adamw_8bit(config: Adamw8bitConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    class ShardedAdamW8bit(AdamW8bit):
        """Compile the step separately on each rank.

        torch caches compiled steps on disk by the size of the full weight. A rank would load the step compiled for
        another rank's number of rows and fail ("expected size 51==50").
        """

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return super().step(closure)

    is_sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return (ShardedAdamW8bit if is_sharded else AdamW8bit)(
        groups, betas=(config.beta1, config.beta2), eps=config.epsilon
    )


def _split(groups: list[ParamGroup], predicate: Callable[[Tensor], bool]) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """Split groups into weights that satisfy the predicate and the rest, dropping empty groups."""
    halves: list[list[ParamGroup]] = []
    for wanted in (True, False):
        of_half = [{**group, "params": [p for p in group["params"] if predicate(p) is wanted]} for group in groups]
        halves.append([group for group in of_half if group["params"]])
    return halves[0], halves[1]
