"""Optimizers from torch and torchao, and which weights each of them moves, and how far."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from cohort.config import (
    AdafactorConfig,
    Adamw8bitConfig,
    AdamwConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from cohort.config.optim import StochasticRoundingConfig
from cohort.engine.optimizer_offload import HostUpdates, local
from cohort.engine.stochastic_rounding import noise_key, round_at_random
from cohort.errors import UserError
from cohort.models.fsdp import local_rows
from cohort.models.offload.master_weights import MasterWeights
from cohort.plan.optimizer_memory import check_optimizer_sharding, state_bytes

Group = dict[str, Any]  # of a torch optimizer


def check_optimizer(config: OptimConfig, world_size: int) -> None:
    """To be asked before any weights are loaded.

    Raises:
        UserError: the optimizer is not installed, or cannot move weights that are spread over processes.
    """
    if config.name == "adamw_8bit" and find_spec("torchao") is None:
        raise UserError(
            "optim.name: adamw_8bit needs the package torchao, which is not installed; install cohort-rl[torchao], or "
            "use adamw"
        )
    check_optimizer_sharding(config, world_size)


def check_weights(config: OptimConfig, weights: Mapping[str, Tensor]) -> None:
    """Compare the `optim` section with the weights that will be trained, which need no memory yet.

    Raises:
        UserError: a group matches none of them, or a key has no effect on their dtype.
    """
    _grouped(config, weights)
    if isinstance(config, StochasticRoundingConfig) and config.stochastic_rounding:
        dtypes = {p.dtype for p in weights.values()}
        if torch.bfloat16 not in dtypes:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UserError(
                f"optim.stochastic_rounding: true has no effect on weights of {names}, which keep small updates; "
                f"remove it. It is for weights that are trained in bfloat16"
            )


class Optimizers:
    """One or two torch optimizers that are one to whoever uses them."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, master_weights: MasterWeights | None = None, seed: int = 0
    ):
        """For the weights of `model` that have a gradient.

        Args:
            model: whose weights are moved. They may be sharded.
            config: the `optim` section.
            master_weights: of the model; these are updated instead of its weights.
            seed: of stochastic rounding.

        Raises:
            UserError: a group matches no weight, or the optimizer is not installed or does not suit the weights.
        """
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tables = _tables(model)
        self._trained = list(named.values())
        self._host: HostUpdates | None = None
        if master_weights is not None:
            apart = {name for name, p in named.items() if id(p) in tables}
            self._host = HostUpdates([(parameter, master) for _, parameter, master in master_weights.pairs()])
            model, named = master_weights.tree, {name: master for name, _, master in master_weights.pairs()}
            tables = {id(named[name]) for name in apart}
        self._model, self._config, self._seed = model, config, seed
        self._named = named
        self._rounds = isinstance(config, StochasticRoundingConfig) and config.stochastic_rounding
        self._optimizers = _build(config, _grouped(config, named), tables)
        self._factors = [[group.pop("factor") for group in o.param_groups] for o in self._optimizers]

    def step(self, learning_rate: float, *, update: int = 0) -> None:
        """Move the weights by their gradients, and forget those.

        Args:
            learning_rate: of weights of factor 1.
            update: its number in the run, which stochastic rounding depends on.
        """
        for optimizer, factors in zip(self._optimizers, self._factors, strict=True):
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                if isinstance(group["lr"], Tensor):  # torchao compiles the step, and a number would be a constant
                    group["lr"].fill_(learning_rate * factor)
                else:
                    group["lr"] = learning_rate * factor
        if self._host is not None:
            where = self._places()
            self._host.run(lambda master: _step_alone(*where[id(master)], master))
        elif self._rounds:
            self._step_rounded(update)
        else:
            for optimizer in self._optimizers:
                optimizer.step()
        for parameter in self._trained:
            parameter.grad = None

    def _places(self) -> dict[int, tuple[torch.optim.Optimizer, Group]]:
        """The optimizer and the group of each weight, by its id."""
        return {
            id(p): (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    @torch.no_grad()
    def _step_rounded(self, update: int) -> None:
        """A step of bfloat16 weights: each is float32 meanwhile, and so is what the optimizer keeps of it."""
        where = self._places()
        for name, parameter in self._named.items():
            assert parameter.grad is not None, "every weight has a gradient when it is updated"
            optimizer, group = where[id(parameter)]
            wide = parameter.detach().float()
            wide.grad = parameter.grad.float()
            if parameter in optimizer.state:
                optimizer.state[wide] = optimizer.state.pop(parameter)
            _step_alone(optimizer, group, wide)
            if wide in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(wide)
            own, first_row = local_rows(parameter)
            first = first_row * own[:1].numel()
            round_at_random(local(wide), own, key=noise_key(self._seed, update, name), first=first)

    def state_bytes(self) -> int:
        """What the state of this rank's weights takes once a step has been made."""
        return sum(
            state_bytes(self._config, own.shape, own.element_size(), by_muon=isinstance(optimizer, torch.optim.Muon))
            for optimizer in self._optimizers
            for own in (local(p) for group in optimizer.param_groups for p in group["params"])
        )

    def state_dict(self) -> dict[str, Any]:
        """State by the weights' names, as torch.distributed.checkpoint saves it."""
        self._begin_wide_state()
        return get_optimizer_state_dict(self._model, self._optimizers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._begin_wide_state()
        set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=dict(state))
        if self._rounds:  # torch has cast it to the weights' dtype
            where = self._places()
            for name, parameter in self._named.items():
                wide = {key: x for key, x in state["state"].get(name, {}).items() if isinstance(x, Tensor)}
                where[id(parameter)][0].state[parameter].update(wide)

    def _begin_wide_state(self) -> None:
        """Where updates are rounded at random, have a state before torch asks for one, which would be as narrow as the
        weights: of a step that changes nothing, as torch does it too.
        """
        if self._rounds and not any(optimizer.state for optimizer in self._optimizers):
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
            self.step(0.0)


def _step_alone(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> None:
    """The step of one weight, by its group's numbers."""
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def _tables(model: nn.Module) -> set[int]:
    """The weights of embeddings and of heads: matrices that map no hidden state to another. Adapters' too."""
    found = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    found += [getattr(model, "value_head", None), *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    return {id(p) for module in found if isinstance(module, nn.Module) for p in module.parameters()}


def _grouped(config: OptimConfig, named: Mapping[str, Tensor]) -> list[Group]:
    """Weights by how they learn: weight decay and the factor of the learning rate."""
    groups: dict[tuple[float, float], Group] = {}
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
            f"optim.groups: match: {pattern!r} is the name of no weight that is trained, or an earlier group has all "
            f"of its weights; names are like {', '.join(near or list(named)[:3])}"
        )
    return list(groups.values())


def _build(config: OptimConfig, groups: list[Group], apart: set[int]) -> tuple[torch.optim.Optimizer, ...]:
    match config:
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
            matrices, rest = _split(groups, lambda p: p.ndim == 2 and id(p) not in apart)
            built: list[torch.optim.Optimizer] = []
            if matrices:
                built.append(torch.optim.Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
            if rest:
                built.append(_adamw(config, rest))
            return tuple(built)


def _adamw(config: AdamwConfig | MuonConfig, groups: list[Group]) -> torch.optim.Optimizer:
    device = groups[0]["params"][0].device
    return torch.optim.AdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.type in ("cpu", "cuda"),
    )


def _adamw_8bit(config: Adamw8bitConfig, groups: list[Group]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    class OfOwnShard(AdamW8bit):
        """Compiles its step for the shards of this rank alone.

        torch keeps compiled steps on disk by the size of the whole weight: a rank would run what another one compiled
        for its own number of rows, and fail ("expected size 51==50").
        """

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return super().step(closure)

    is_sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return (OfOwnShard if is_sharded else AdamW8bit)(groups, betas=(config.beta1, config.beta2), eps=config.epsilon)


def _split(groups: list[Group], belongs: Callable[[Tensor], bool]) -> tuple[list[Group], list[Group]]:
    """Groups of the weights that belong, and of those that do not; none is empty."""
    halves: list[list[Group]] = []
    for wanted in (True, False):
        of_half = [{**group, "params": [p for p in group["params"] if belongs(p) is wanted]} for group in groups]
        halves.append([group for group in of_half if group["params"]])
    return halves[0], halves[1]
