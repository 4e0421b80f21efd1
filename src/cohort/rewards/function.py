"""A reward function with its settings, and what its signature says it wants."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

ROLLOUT_NAMES = ("prompts", "completions", "completion_ids")  # what every function may ask for, besides columns


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One reward of the run: `function(prompts=..., completions=..., **columns, **args) -> list[float | None]`."""

    name: str
    function: Callable[..., Any]  # sync or async; everything is passed by keyword
    weight: float = 1.0  # of this part in the weighted sum; may be negative
    args: Mapping[str, Any] = field(default_factory=dict)  # extra keyword arguments
    timeout_s: float = 300.0  # deadline of one call, which covers all completions of a step
    shapes: bool = False  # it adds to what others judge: a completion that only it has a number for is not judged


@runtime_checkable
class ChecksArguments(Protocol):
    """A reward that can judge its `args` before the run. The built-in rewards do; a user's may."""

    def required_columns(self, **args: Any) -> Sequence[str]:
        """The dataset columns that the reward needs with these `args`.

        Raises:
            ValueError: an argument does not work; the text names it, its value and what works.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """The keyword arguments that a function takes."""

    names: frozenset[str]  # parameters that can be given by keyword
    required: tuple[str, ...]  # those of them without a default, in order
    positional_only: tuple[str, ...]  # required, but impossible to give by keyword
    takes_any: bool  # has **kwargs

    def accepts(self, name: str) -> bool:
        """Whether `name` may be passed."""
        return self.takes_any or name in self.names


def wanted_arguments(function: Callable[..., Any]) -> Wanted:
    """Reads a function's signature.

    Raises:
        ValueError: the function has no readable signature (some functions written in C).
    """
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in by_keyword]
    no_default = [p for p in parameters if p.default is inspect.Parameter.empty]
    return Wanted(
        names=frozenset(p.name for p in named),
        required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
        positional_only=tuple(p.name for p in no_default if p.kind is inspect.Parameter.POSITIONAL_ONLY),
        takes_any=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def own_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """The `args` of a reward that `ChecksArguments`; all else that it takes are columns. Empty for other functions."""
    return wanted_arguments(function.required_columns).names if isinstance(function, ChecksArguments) else frozenset()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine: `async def`, a partial of one, or an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
