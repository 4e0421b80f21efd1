"""Environment classes in TRL's form: `reset(**row)`, public methods as tools, `get_reward()`, `step_reward()`."""

import inspect
import math
import types
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cohort.chat import tool_schema
from cohort.errors import UserError, describe_error, excerpt
from cohort.rollout.engines.base import CallKey
from cohort.rollout.environments.handle import DeadlineMissed, EnvironmentHandle
from cohort.rollout.environments.model import EnvironmentFailure
from cohort.rollout.environments.tools import Schema
from cohort.rollout.environments.trajectory import Row

_NOT_TOOLS = ("reset", "get_reward", "step_reward", "close")
_PURPOSES = ("train", "eval", "parity")  # position in seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInterface:
    """Methods of an environment class, without an instance."""

    name: str  # of the class
    schemas: tuple[Schema, ...]  # of its tools
    reset_parameters: frozenset[str]
    reset_required: tuple[str, ...]  # parameters without a default
    reset_takes_all: bool  # has **kwargs
    has_get_reward: bool
    has_step_reward: bool

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that `reset` needs."""
        return tuple(name for name in self.reset_required if name != "seed")

    @property
    def gives_reward(self) -> bool:
        """Whether trajectories get a reward from the environment."""
        return self.has_get_reward or self.has_step_reward

    @classmethod
    def of(cls, environment: type, *, field: str) -> Self:
        """Inspect a class.

        Raises:
            UserError: it has no `reset`, or a public method cannot be a tool.
        """
        reset = getattr(environment, "reset", None)
        if not callable(reset):
            raise UserError(
                f"{field}: class {environment.__name__} has neither `reset(**row)`, as environment classes have, nor "
                f"`async def run(row, model)`"
            )
        parameters = list(inspect.signature(reset).parameters.values())[1:]  # without self
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            name=environment.__name__,
            schemas=tuple(_schemas(environment, field=field)),
            reset_parameters=frozenset(p.name for p in by_name),
            reset_required=tuple(p.name for p in by_name if p.default is p.empty),
            reset_takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
            has_get_reward=callable(getattr(environment, "get_reward", None)),
            has_step_reward=callable(getattr(environment, "step_reward", None)),
        )

    def reset_arguments(self, row: Row, key: CallKey) -> dict[str, Any]:
        """Return the arguments of `reset`: the columns that it names, and a seed if it names one and no column does."""
        arguments = {
            name: value for name, value in row.items() if self.reset_takes_all or name in self.reset_parameters
        }
        if "seed" in self.reset_parameters and "seed" not in row:
            arguments["seed"] = reset_seed(key)
        return arguments


@dataclass(slots=True, eq=False, kw_only=True)
class Environment:
    """One instance of an environment class, for one trajectory. Every problem is an `EnvironmentFailure`."""

    handle: EnvironmentHandle  # calls the instance's methods
    interface: EnvironmentInterface  # of its class
    timeout_s: float  # deadline of every call

    async def reset(self, arguments: Mapping[str, Any], key: CallKey) -> str | None:
        """Start a trajectory and return the first observation, if there is one."""
        reset = self.handle.call("reset", arguments, timeout_s=self.timeout_s, seed=reset_seed(key))
        observation = await self._await("reset", reset)
        if observation is None or isinstance(observation, str):
            return observation
        parts = observation if isinstance(observation, list) else [observation]
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
        raise EnvironmentFailure(
            f"{self.interface.name}.reset returned {excerpt(observation)} "
            f"({type(observation).__name__}); it must return text or None (only text is "
            f"supported)"
        )

    async def reward(self) -> float | None:
        """Return the reward of the finished trajectory; None if the class gives none, or did not score this one."""
        if not self.interface.has_get_reward:
            return None
        value = await self._call("get_reward", {})
        return None if value is None else self._number("get_reward", value)

    async def step_reward(self) -> float:
        """Return the reward of the last turn."""
        return self._number("step_reward", await self._call("step_reward", {}))

    async def instance(self) -> Any:
        """Return the instance for reward functions."""
        await self._await("attributes", self.handle.refresh(timeout_s=self.timeout_s))
        return self.handle.instance

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        return await self._await(method, self.handle.call(method, arguments, timeout_s=self.timeout_s))

    async def _await(self, method: str, result: Awaitable[Any]) -> Any:
        where = f"{self.interface.name}.{method}"
        try:
            return await result
        except DeadlineMissed as error:
            raise EnvironmentFailure(f"{where}: {error} (rollout.tool_timeout_s)") from error
        except Exception as error:
            raise EnvironmentFailure(f"{where} raised {describe_error(error)}") from error

    def _number(self, method: str, value: Any) -> float:
        number = value
        if not isinstance(value, bool | int | float):
            with suppress(Exception):  # several numbers, or an object's own `item`
                number = value.item()
        if not isinstance(number, bool | int | float) or not math.isfinite(number):
            raise EnvironmentFailure(
                f"{self.interface.name}.{method} returned {excerpt(value)} ({type(value).__name__}); "
                f"it must return a finite number"
            )
        return float(number)


def reset_seed(key: CallKey) -> int:
    """Return the seed of a trajectory's `reset`, below 2**31, from (seed, step, prompt, index)."""
    return int(_entropy(key, key.index)) >> 1


def group_fraction(key: CallKey) -> float:
    """Return a random number in [0, 1) that all trajectories of a group share."""
    return float(_entropy(key)) / 2**32


def _entropy(key: CallKey, *more: int) -> int:
    words = (key.seed, _PURPOSES.index(key.purpose), key.step, key.epoch, key.prompt_id, *more)
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def _schemas(environment: type, *, field: str) -> list[Schema]:
    """Schemas of the public methods, which are tools."""
    schemas: list[Schema] = []
    for name, function in inspect.getmembers(environment, predicate=inspect.isfunction):
        if name.startswith("_") or name in _NOT_TOOLS:
            continue
        is_static = isinstance(inspect.getattr_static(environment, name), staticmethod)
        method = function if is_static else types.MethodType(function, environment)  # without self
        try:
            schemas.append(tool_schema(method))
        except UserError as error:
            raise UserError(
                f"{field}: public methods of {environment.__name__} are tools: {error}. Begin the name of a method "
                f"that is not a tool with an underscore"
            ) from error
    return schemas
