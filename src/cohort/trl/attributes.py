"""Attributes of TRL's trainer that scripts and subclasses read, besides those that training needs."""

import shutil
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import AutoConfig, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from cohort.errors import UserError
from cohort.launch.given_optimizer import GivenOptimizer
from cohort.launch.python_trainer import Trainer
from cohort.models import merge
from cohort.ranks.join import rank_of_launcher
from cohort.trl.config import GRPOConfig

_FIELDS = {field.name: field.name for field in fields(GRPOConfig)} | {"epsilon_low": "epsilon"}


class TrainerAttributes:
    """Arguments as attributes, such as `trainer.num_generations`; callbacks; ranks."""

    args: GRPOConfig
    callback_handler: CallbackHandler
    _optimizer: GivenOptimizer | None

    def __getattr__(self, name: str) -> Any:
        args = vars(self).get("args")
        if args is None or name not in _FIELDS or not hasattr(args, _FIELDS[name]):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(args, _FIELDS[name])
        return args.epsilon if name == "epsilon_high" and value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS or "args" not in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif getattr(self, name) != value:
            raise UserError(f"{name}: cannot be changed on the trainer; set args.{_FIELDS[name]} before train()")

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, given as a class or an instance."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    @property
    def optimizer(self) -> Any:
        """The given optimizer; otherwise the run's own while it trains, or None."""
        return self.callback_handler.optimizer if self._optimizer is None else self._optimizer.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The given scheduler; otherwise an object whose get_last_lr() returns the current learning rates, or None."""
        given = None if self._optimizer is None else self._optimizer.scheduler
        return self.callback_handler.lr_scheduler if given is None else given

    def is_world_process_zero(self) -> bool:
        """Whether this process is rank 0."""
        return rank_of_launcher() == 0

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first of its machine."""
        return self.args.local_process_index == 0


def as_peft(trainer: Trainer) -> Any:
    """Return the model of a trainer with an adapter, with the methods of `peft.PeftModel` that scripts call."""
    model, weak = trainer.model, weakref.proxy(trainer)  # a model that kept its trainer alive would keep all memory

    def save_pretrained(save_directory: str | Path, **_: Any) -> None:
        weak.save(save_directory)

    def merge_and_unload(**_: Any) -> Any:
        folder = (
            Path(weak.config.run.dir) / "merged"
        )  # every rank calls this, or rank 0 alone, and all see the run folder
        weak.save(folder / "adapter")
        if rank_of_launcher() == 0:
            (folder / "model").mkdir(exist_ok=True)
            merge(folder / "adapter", folder / "model")
        weak.on_any_rank([False])  # it is merged
        (architecture,) = AutoConfig.from_pretrained(folder / "model").architectures
        merged = getattr(transformers, architecture).from_pretrained(folder / "model", dtype="auto")
        weak.on_any_rank([False])  # all have loaded it
        if rank_of_launcher() == 0:
            shutil.rmtree(folder)
        return merged

    model.save_pretrained, model.merge_and_unload = save_pretrained, merge_and_unload
    return model


def accelerator(args: GRPOConfig, wait_for_everyone: Callable[[], object]) -> Any:
    """Return what scripts read of `trainer.accelerator`.

    Rewards see all completions of a step, so what they gather is there already.
    """
    return SimpleNamespace(
        is_main_process=args.process_index == 0,
        is_local_main_process=args.local_process_index == 0,
        process_index=args.process_index,
        local_process_index=args.local_process_index,
        num_processes=args.world_size,
        device=args.device,
        unwrap_model=lambda model, **_: model,
        gather=_same,
        gather_for_metrics=_same,
        wait_for_everyone=wait_for_everyone,
        print=print if args.process_index == 0 else _silent,
    )


def _same(value: Any, **_: object) -> Any:
    """Return the value."""
    return value


def _silent(*_: object, **__: object) -> None:
    """Print nothing."""
