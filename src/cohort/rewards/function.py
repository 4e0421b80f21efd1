"""Reward functions with their settings and signatures, and the arguments that TRL passes to them."""

import functools
import importlib
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cohort.errors import UserError, excerpt

if TYPE_CHECKING:
    from cohort.rewards.caught import Caught


def require_package(name: str, *, extra: str) -> None:
    """Check that the package of an extra is installed.

    Raises:
        ValueError: it is not.
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"needs the package {error.name}; install it with `pip install 'cohort-rl[{extra}]'`"
        ) from error


TRL_NAMES = ("trainer_state", "log_metric", "log_extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """How far a run is, with the names of `transformers.TrainerState`; what has no meaning here is None."""

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps of the run
    epoch: float = 0.0  # epochs of the dataset done
    num_train_epochs: int = 1  # epochs begun by the end of the run
    log_history: Sequence[Mapping[str, float]] = ()  # metrics of the last steps, with the key "step"
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    logging_steps: None = None
    eval_steps: None = None
    save_steps: None = None
    train_batch_size: None = None
    num_input_tokens_seen: None = None
    total_flos: None = None
    best_metric: None = None
    best_global_step: None = None
    best_model_checkpoint: None = None
    trial_name: None = None
    trial_params: None = None
    stateful_callbacks: None = None


@dataclass(slots=True)
class RewardLog:
    """Collects what a reward function logs during one call."""

    metrics: dict[str, list[float]] = field(default_factory=dict)  # by name, one per `log_metric`
    extras: dict[str, list[Any]] = field(default_factory=dict)  # by column, one per completion

    def arguments(self, progress: TrainerProgress) -> dict[str, Any]:
        """Return the arguments for a function, by the names of `TRL_NAMES`."""
        return dict(zip(TRL_NAMES, (progress, self.log_metric, self.log_extra), strict=True))

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric, averaged over the calls of a step.

        Raises:
            UserError: `value` is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(f"log_metric({name!r}, {excerpt(value)}): the value must be a number") from None
        self.metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per completion, for the completions files and the page."""
        self.extras.setdefault(str(column), []).extend(values)

    def details(self, count: int) -> dict[str, list[str | None]]:
        """Return the logged columns as texts.

        Args:
            count: number of completions of the call.

        Raises:
            UserError: a column has another number of values.
        """
        for column, values in self.extras.items():
            if len(values) != count:
                raise UserError(f"log_extra({column!r}, ...): {len(values)} values for {count} completions")
        return {
            column: [None if value is None else _text(value) for value in values]
            for column, values in self.extras.items()
        }


def mean_metrics(logs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of all values of each metric."""
    together: dict[str, list[float]] = {}
    for metrics in logs:
        for name, values in metrics.items():
            together.setdefault(name, []).extend(values)
    return {name: sum(values) / len(values) for name, values in together.items()}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, numbers.Real) and not isinstance(value, bool) else str(value)


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
    per_group: bool = False  # the user's function scores each group by itself


@runtime_checkable
class ChecksArguments(Protocol):
    """A function of the user that can validate its `args` before the run."""

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


class Reports:
    """What a reward may tell beside its values. Functions of users may have these attributes, too."""

    shapes: bool = False  # only shapes others: a completion scored by no other reward counts as not scored
    notes: Sequence[str] = ()  # for the start of the run
    warnings: Sequence[str] = ()  # for the run's summary
    last_warnings: Sequence[str] = ()  # of the last call
    last_counts: Mapping[str, int] = MappingProxyType({})  # completions of the last call by what is noteworthy
    # of the last call: one text for each completion, or those of several columns
    last_details: Sequence[str | None] | Mapping[str, Sequence[str | None]] | None = None
    last_caught: "tuple[Caught, int] | None" = None  # exceptions of the first call in a process, and its completions


def reports_of(function: Callable[..., Any]) -> Reports:
    """Return what a reward tells at the moment."""
    if isinstance(function, Reports):
        return function
    told = Reports()
    vars(told).update({name: getattr(function, name) for name in Reports.__annotations__ if hasattr(function, name)})
    return told


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
    """Inspect a function's signature, unless it knows its parameters itself, as one in a child process does.

    Raises:
        ValueError: the signature is not available (some functions written in C).
    """
    known = getattr(function, "keyword_parameters", None)
    if isinstance(known, KeywordParameters):
        return known
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
