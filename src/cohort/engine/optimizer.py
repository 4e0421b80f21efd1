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
from cohort.errors import UserError
from cohort.plan.optimizer import check_spread, state_bytes

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
    check_spread(config, world_size)


def check_weights(config: OptimConfig, weights: Mapping[str, Tensor]) -> None:
    """Compare the `optim` section with the weights that will be trained, which need no memory yet.

    Raises:
        UserError: a group matches none of them, or a key has no effect on their dtype.
    """
    _grouped(config, weights)
    if isinstance(config, Adamw8bitConfig) and config.stochastic_rounding:
        dtypes = {p.dtype for p in weights.values()}
        if torch.bfloat16 not in dtypes:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UserError(
                f"optim.stochastic_rounding: true has no effect on weights of {names}, which keep small updates; "
                f"remove it. It is for weights that are trained in bfloat16"
            )


class Optimizers:
    """One or two torch optimizers that are one to whoever uses them."""

    def __init__(self, model: nn.Module, config: OptimConfig):
        """For the weights of `model` that have a gradient.

        Args:
            model: whose weights are moved. They may be sharded.
            config: the `optim` section.

        Raises:
            UserError: a group matches no weight, or the optimizer is not installed or does not suit the weights.
        """
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._model, self._config = model, config
        self._optimizers = _build(config, _grouped(config, named), _tables(model))
        self._factors = [[group.pop("factor") for group in o.param_groups] for o in self._optimizers]

    def step(self, learning_rate: float) -> None:
        """Move the weights by their gradients, and forget those."""
        for optimizer, factors in zip(self._optimizers, self._factors, strict=True):
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                if isinstance(group["lr"], Tensor):  # torchao compiles the step, and a number would be a constant
                    group["lr"].fill_(learning_rate * factor)
                else:
                    group["lr"] = learning_rate * factor
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        """What the state of this rank's weights takes once a step has been made."""
        return sum(
            state_bytes(self._config, own.shape, own.element_size(), by_muon=isinstance(optimizer, torch.optim.Muon))
            for optimizer in self._optimizers
            for own in (local(p) for group in optimizer.param_groups for p in group["params"])
        )

    def state_dict(self) -> dict[str, Any]:
        """State by the weights' names, as torch.distributed.checkpoint saves it."""
        return get_optimizer_state_dict(self._model, self._optimizers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=dict(state))


def local(parameter: Tensor) -> Tensor:
    """What of a parameter is on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


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

    return AdamW8bit(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        bf16_stochastic_round=config.stochastic_rounding,
    )


def _split(groups: list[Group], belongs: Callable[[Tensor], bool]) -> tuple[list[Group], list[Group]]:
    """Groups of the weights that belong, and of those that do not; none is empty."""
    halves: list[list[Group]] = []
    for wanted in (True, False):
        of_half = [{**group, "params": [p for p in group["params"] if belongs(p) is wanted]} for group in groups]
        halves.append([group for group in of_half if group["params"]])
    return halves[0], halves[1]
