"""`optimizers=(optimizer, scheduler)` of TRL's trainer, and what scripts read of the two."""

from typing import Any

from torch.optim import Optimizer

from cohort.errors import UserError
from cohort.launch.given_optimizer import GivenOptimizer
from cohort.learner.optimizer import Optimizers

_SCHEDULE = ("lr_schedule", "min_lr_ratio", "warmup_steps", "warmup_ratio")


def given_optimizer(optimizers: Any, model: Any) -> GivenOptimizer | None:
    """Return what was given as `optimizers`; None for the optimizer of the arguments.

    Raises:
        UserError: it is not a pair, or the optimizer cannot train this model.
    """
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise UserError(f"optimizers: must be a pair (optimizer, scheduler), not {type(optimizers).__name__}")
    optimizer, scheduler = optimizers
    if optimizer is None and scheduler is None:
        return None
    return GivenOptimizer(optimizer, scheduler, model, field="optimizers")


def without_optimizer(sections: dict[str, dict[str, Any]], given: GivenOptimizer) -> None:
    """Drop the keys that a given optimizer or scheduler replaces, as transformers ignores these arguments."""
    del sections["optim"]
    for key in ("learning_rate", *(_SCHEDULE if given.scheduler is not None else ())):
        sections["train"].pop(key, None)


def scheduler_of(optimizer: Optimizers) -> Any:
    """Return the given scheduler, or an object whose get_last_lr() returns the current learning rates."""
    given = None if optimizer.custom is None else optimizer.custom.scheduler
    return _Rates(optimizer.first) if given is None else given


class _Rates:
    """What scripts read of a scheduler, where Cohort sets the learning rates itself."""

    def __init__(self, optimizer: Optimizer):
        """The optimizer has the rates."""
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]
