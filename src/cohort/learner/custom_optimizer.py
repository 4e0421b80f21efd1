"""Optimizers of the user's own, and their learning-rate schedulers."""

import inspect
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cohort.config import CustomOptimConfig
from cohort.config.user_code import error_location, load_callable
from cohort.errors import UserError, describe_error
from cohort.learner.optimizer_offload import to_local

# Module or class -> what to use: they keep weights, state or codes where checkpoints do not find them
_INSTEAD = {
    "bitsandbytes.": "optim.name: adamw_8bit",
    "deepspeed.": "optim.name: adamw with offload: true",
    "torchao.optim.cpu_offload": "optim.name: adamw with offload: true",
    "torchao.": "optim.name: adamw_8bit",
}


class CustomOptimizer:
    """An optimizer that `optim.use` has made, with its scheduler if it brings one."""

    def __init__(self, config: CustomOptimConfig, named: Mapping[str, nn.Parameter]):
        """Call `optim.use`.

        Args:
            config: the `optim` section.
            named: trained parameters by name; they may be sharded.

        Raises:
            UserError: it fails, or returns something else, or an optimizer of other parameters.
        """
        made = _call(config, named)
        optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        self.optimizer, self.scheduler = check_optimizers(optimizer, scheduler, field=f"optim.use: {config.use!r}")
        names = {id(p): name for name, p in named.items()}
        held = [[names.get(id(p)) for p in group["params"]] for group in self.optimizer.param_groups]
        if any(name is None for group in held for name in group):
            raise UserError(
                f"optim.use: {config.use!r}: the optimizer holds parameters that are not trained; make it from those "
                f"that it is called with"
            )
        if not any(held):
            raise UserError(
                f"optim.use: {config.use!r}: the optimizer holds none of the trained parameters, which are "
                f"{', '.join(list(named)[:3])} ...; make it from those"
            )
        if isinstance(optimizer, torch.optim.Adafactor) and any(isinstance(p, DTensor) for p in named.values()):
            raise UserError(
                "optim.use: torch's Adafactor does not support sharded weights; use another optimizer, or one process"
            )
        self._rates = [
            None if (rate := group.get("lr")) is None else float(rate) for group in self.optimizer.param_groups
        ]

    def set_learning_rates(self, factor: float) -> float:
        """Multiply the initial learning rates by the schedule's factor, unless a scheduler sets them.

        Returns:
            The learning rate of the first group; NaN if the optimizer has none.
        """
        if self.scheduler is None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                if rate is not None:
                    set_learning_rate(group, rate * factor)
        first = self.optimizer.param_groups[0].get("lr")
        return float("nan") if first is None else float(first)

    def advance(self) -> None:
        """Count an update, for the scheduler."""
        if self.scheduler is not None:
            with warnings.catch_warnings():  # a step with a zero gradient is counted, but not taken
                warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
                self.scheduler.step()

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint has besides the optimizer's state: what made it, and the scheduler's state."""
        record: dict[str, Any] = {"made_by": self._description()}
        if self.scheduler is not None:
            record["scheduler"] = pickle.dumps(self.scheduler.state_dict())
        return record

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the scheduler's state from `record`."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(pickle.loads(record["scheduler"]))

    def _description(self) -> str:
        sizes = " and ".join(str(len(group["params"])) for group in self.optimizer.param_groups)
        scheduler = "" if self.scheduler is None else f" with {_class_name(self.scheduler)}"
        return f"{_class_name(self.optimizer)} of {sizes} weights{scheduler}"

    @contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Context in which torch may make the missing state by a step, which must not change any weight."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [] if self.optimizer.state else [to_local(p).detach().to("cpu", copy=True) for p in weights]
        yield
        for weight, value in zip(weights, before, strict=False):
            with torch.no_grad():
                to_local(weight).copy_(value)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group."""
    if isinstance(group["lr"], Tensor):  # of a compiled step, where a float would be a constant
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def check_optimizers(optimizer: Any, scheduler: Any, *, field: str) -> tuple[Optimizer, LRScheduler | None]:
    """Return the two if they can be used.

    Raises:
        UserError: one is something else, is not supported, or they do not belong together.
    """
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{field}: must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    name = _class_name(optimizer)
    for start, instead in _INSTEAD.items():
        if name.startswith(start):
            raise UserError(
                f"{field}: {name} is not supported, because checkpoints cannot store its state; use {instead}"
            )
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise UserError(f"{field}: {name}.step needs a closure; use another optimizer") from None
    try:  # as torch calls it to save and load the state
        inspect.signature(type(optimizer).step).bind(optimizer, closure=None)
    except TypeError:
        raise UserError(f"{field}: {name}.step does not accept closure=None; define step(self, closure=None)") from None
    if scheduler is None:
        return optimizer, None
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            f"{field}: {type(scheduler).__name__} cannot be used, because it is not stepped after each update; use "
            f"another scheduler of torch.optim.lr_scheduler, or a get_*_schedule of transformers"
        )
    if scheduler.optimizer is not optimizer:
        raise UserError(f"{field}: the scheduler was made for another optimizer; make it for this one")
    try:
        pickle.dumps(scheduler.state_dict())
    except Exception as error:  # of many types
        raise UserError(
            f"{field}: {_class_name(scheduler)} cannot be used, because its state_dict() cannot be pickled for "
            f"checkpoints: {describe_error(error)}; leave out what cannot, as LambdaLR does"
        ) from error
    return optimizer, scheduler


def _call(config: CustomOptimConfig, named: Mapping[str, nn.Parameter]) -> Any:
    make = load_callable(config.use, field="optim.use")
    try:
        by_name = "named_parameters" in inspect.signature(make).parameters
    except ValueError:  # a class without a signature
        by_name = False
    given: Any = dict(named) if by_name else list(named.values())
    try:
        return make(given, **deepcopy(config.args))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"optim.use: {config.use!r}: {describe_error(error)} (at {error_location(error)})") from error


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
