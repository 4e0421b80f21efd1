"""Reward functions with their settings and signatures."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol, runtime_checkable

ROLLOUT_NAMES = ("prompts", "completions", "completion_ids")  # arguments available to every function, besides columns
ON_REQUEST = ("trajectories", "environments")  # passed to functions that name them, unless a column has the name


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One reward of a run: `function(prompts=..., completions=..., **columns, **args) -> list[float | None]`."""

    name: str
    function: Callable[..., Any]  # sync or async; everything is passed by keyword
    weight: float = 1.0  # factor in the weighted sum; may be negative
    args: Mapping[str, Any] = field(default_factory=dict)  # extra keyword arguments
    timeout_s: float = 300.0  # deadline of one call, which covers all completions of a step
    shapes: bool = False  # reward shaping only: a completion scored by no other reward counts as not scored
    gate: bool = False  # rewards after it are 0 for completions for which this one is below 1
    scale: float | tuple[float, float] = 1.0  # a factor, or the values that become 0 and 1
    clip: tuple[float, float] | None = None  # bounds of the scaled value
    where: Mapping[str, Any] = field(default_factory=dict)  # column -> value or values of the rows it is for


@runtime_checkable
class ChecksArguments(Protocol):
    """A reward that can validate its `args` before the run. Built-in rewards do; user functions may."""

    def required_columns(self, **args: Any) -> Sequence[str]:
        """Return the dataset columns that the reward needs with these `args`.

        Raises:
            ValueError: an argument is invalid; the message names it, its value and what works.
        """
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that can validate the dataset's rows before the run, such as their answers."""

    def check_row(self, row: Mapping[str, Any], **args: Any) -> None:
        """Check a row with these `args`.

        Raises:
            UserError: the reward cannot score it; the message names the column, its value and what works.
        """
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """A reward whose calls may take long: they call `on_progress` with the number of verdicts that are done and of all.

    A call may have fewer verdicts than completions, since equal ones are judged once.
    """

    on_progress: Callable[[int, int], None]  # set before each call


@dataclass(frozen=True, slots=True)
class KeywordParameters:
    """Parameters of a function that can be passed by keyword."""

    names: frozenset[str]
    required: tuple[str, ...]  # those without a default, in order
    positional_only: tuple[str, ...]  # required parameters that cannot be passed by keyword
    has_var_keyword: bool  # has **kwargs

    def accepts(self, name: str, *, unless: Collection[str] = ()) -> bool:
        """Whether `name` may be passed. Names in `unless` are only passed if the function names them."""
        return name in self.names or (self.has_var_keyword and name not in unless)


def keyword_parameters(function: Callable[..., Any]) -> KeywordParameters:
    """Inspect a function's signature.

    Raises:
        ValueError: the signature is not available (some functions written in C).
    """
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _signature(function).parameters.values()
    named = [p for p in parameters if p.kind in by_keyword]
    no_default = [p for p in parameters if p.default is inspect.Parameter.empty]
    return KeywordParameters(
        names=frozenset(p.name for p in named),
        required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
        positional_only=tuple(p.name for p in no_default if p.kind is inspect.Parameter.POSITIONAL_ONLY),
        has_var_keyword=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the outermost decorator that names parameters, else of what they decorate."""
    signature = inspect.signature(function, follow_wrapped=False)
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        return signature
    if isinstance(function, MethodType) or not hasattr(function, "__wrapped__"):
        return inspect.signature(function)
    return _signature(function.__wrapped__)


def reward_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a reward's own `args` if it implements `ChecksArguments`; else none."""
    return keyword_parameters(function.required_columns).names if isinstance(function, ChecksArguments) else frozenset()


def column_keyword(name: str, taken: Collection[str]) -> str:
    """Return the keyword under which a reward gets a column: its name, or `column:NAME` if that is taken."""
    return f"column:{name}" if name in taken else name


def column_values(
    columns: Mapping[str, Sequence[Any]], name: str, default: Sequence[Any] | None = None
) -> Sequence[Any]:
    """Return the values of a column among a reward's `**columns`, under either keyword (see `column_keyword`).

    Raises:
        KeyError: there is no such column, and no default.
    """
    values = columns.get(f"column:{name}", columns.get(name, default))
    if values is None:
        raise KeyError(name)
    return values


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` returns a coroutine: `async def`, an async `__call__`, or a partial of either."""
    function = _without_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of an object's class, also behind `functools.partial`."""
    function = _without_partial(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def unique_names(names: Sequence[str]) -> list[str]:
    """Number equal names: exact, exact_2."""
    unique: list[str] = []
    for name in names:
        candidates = (name if i == 1 else f"{name}_{i}" for i in range(1, len(names) + 1))
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique
