"""An optimizer that is given as an object, made for the parameters of a model that is given as an object.

The model that trains is loaded from what that model was saved as, and may be sharded: the optimizer is made to update
its parameters, by their names.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cohort.errors import UserError
from cohort.launch.given_model import is_model, names_in_run
from cohort.learner.custom_optimizer import check_optimizers

_FACTORY = (
    "give a class or function instead, which is called with the trained parameters: cohort.Trainer(optimizer=...)"
)


class GivenOptimizer:
    """An optimizer and its scheduler, which `optim.use` calls each time a run starts or goes on."""

    def __init__(self, optimizer: Any, scheduler: Any, model: Any, *, field: str = "optimizer"):
        """Note how both begin.

        Args:
            optimizer: of parameters of `model`; it has made no step yet. None: that of the scheduler.
            scheduler: changes its learning rates; may be None.
            model: the object that was given as the model.
            field: of the arguments, in messages.

        Raises:
            UserError: they cannot be used, or the optimizer has parameters of another model, or state.
        """
        if optimizer is None:
            optimizer = getattr(scheduler, "optimizer", None)
        self.optimizer, self.scheduler = check_optimizers(optimizer, scheduler, field=field)
        if not is_model(model):
            raise UserError(
                f"{field}: {model!r} is loaded when training starts, so the optimizer has the parameters of another "
                f"model; load the model, make the optimizer of its parameters, and pass both; or {_FACTORY}"
            )
        if self.optimizer.state:
            raise UserError(
                f"{field}: {type(optimizer).__name__} has already made steps; pass a new one, without state"
            )
        self.__name__ = type(optimizer).__name__
        self._names = self._names_in_groups(model, field)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self._initial = deepcopy((groups, {} if scheduler is None else scheduler.state_dict()))

    def __call__(self, named_parameters: Mapping[str, nn.Parameter]) -> tuple[Optimizer, Any]:
        """Return both as they began, with the optimizer updating parameters of these names.

        Raises:
            UserError: the run does not train some that it should update.
        """
        optimizer, (groups, schedule) = self.optimizer, deepcopy(self._initial)
        wanted = [name for names in self._names for name in names]
        if missing := [name for name in wanted if name not in named_parameters]:
            raise UserError(
                f"optimizer: {self.__name__} has {len(wanted)} parameters, of which the run does not train "
                f"{len(missing)} ({', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}). Freeze parameters by "
                f"requires_grad_(False) before making it, not by model.freeze; with peft_config, add the adapter first "
                f"(peft.get_peft_model) and make the optimizer of its parameters"
            )
        optimizer.state.clear()
        for group, names, values in zip(optimizer.param_groups, self._names, groups, strict=True):
            group.clear()
            group |= {**values, "params": [named_parameters[name] for name in names]}
        if self.scheduler is not None:
            self.scheduler.load_state_dict(schedule)
        return optimizer, self.scheduler

    def _names_in_groups(self, model: Any, field: str) -> list[list[str]]:
        """Return the names of the optimizer's parameters that the model trains, by group."""
        in_run = names_in_run(model)
        names = {id(p): in_run.get(name) for name, p in model.named_parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = {id(p) for p in held}
        if foreign := len(ids - names.keys()):
            raise UserError(
                f"{field}: {foreign} of the {len(ids)} parameters of {self.__name__} are not parameters of the model; "
                f"make it of model.parameters(), of the very model that you pass"
            )
        others = {k: v for k, v in vars(self.optimizer).items() if k not in ("param_groups", "state", "defaults")}
        if any(id(value) in ids for other in others.values() for value in _inside(other)):
            raise UserError(f"{field}: {self.__name__} keeps parameters outside of its param_groups; {_FACTORY}")
        return [
            [name for p in group["params"] if p.requires_grad and (name := names[id(p)]) is not None]
            for group in self.optimizer.param_groups
        ]


def optim_section(optimizer: Any, model: Any) -> dict[str, Any]:
    """Return the `optim` section for `Trainer(optimizer=...)`.

    Raises:
        UserError: it is neither an optimizer, nor a pair of one and a scheduler, nor a class or function.
    """
    if isinstance(optimizer, Optimizer):
        optimizer = (optimizer, None)
    if isinstance(optimizer, tuple) and len(optimizer) == 2:
        return {"name": "custom", "use": GivenOptimizer(*optimizer, model)}
    if not callable(optimizer):
        raise UserError(
            f"optimizer: must be a torch.optim.Optimizer, a pair of one and its scheduler, or a class or function that "
            f"makes one, not {type(optimizer).__name__}"
        )
    return {"name": "custom", "use": optimizer}


def _inside(value: Any) -> list[Any]:
    """Return a value, and what is in it if it is a collection."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple | set) else [value]
