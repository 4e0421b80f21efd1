"""Attributes of TRL's trainer that scripts and subclasses read, besides those that training needs."""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from cohort.errors import UserError
from cohort.ranks.join import rank_of_launcher
from cohort.trl.config import GRPOConfig

_FIELDS = {field.name: field.name for field in fields(GRPOConfig)} | {"epsilon_low": "epsilon"}


class TrainerAttributes:
    """Arguments as attributes, such as `trainer.num_generations`; callbacks; ranks."""

    args: GRPOConfig
    callback_handler: CallbackHandler

    def __getattr__(self, name: str) -> Any:
        args = vars(self).get("args")
        if args is None or name not in _FIELDS or not hasattr(args, _FIELDS[name]):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(args, _FIELDS[name])
        return args.epsilon if name == "epsilon_high" and value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS and "args" in vars(self) and not hasattr(type(self), name) and getattr(self, name) != value:
            raise UserError(f"{name}: has no effect on a trainer; set args.{_FIELDS[name]} before it trains")
        super().__setattr__(name, value)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, given as a class or an instance."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this process is rank 0."""
        return rank_of_launcher() == 0

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first of its machine."""
        return self.args.local_process_index == 0


def accelerator(args: GRPOConfig, wait_for_everyone: Callable[[], object]) -> Any:
    """Return what scripts read of `trainer.accelerator`."""
    return SimpleNamespace(
        is_main_process=args.process_index == 0,
        is_local_main_process=args.local_process_index == 0,
        process_index=args.process_index,
        local_process_index=args.local_process_index,
        num_processes=args.world_size,
        device=args.device,
        unwrap_model=lambda model, **_: model,
        wait_for_everyone=wait_for_everyone,
        print=print if args.process_index == 0 else _silent,
    )


def _silent(*_: object, **__: object) -> None:
    """Print nothing."""
