"""Load the configured reward functions and check them before any model is loaded."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards.exact import ExactReward
from cohort.rewards.format import FormatReward
from cohort.rewards.function import (
    ROLLOUT_NAMES,
    ChecksArguments,
    KeywordParameters,
    RewardFunction,
    keyword_parameters,
    reward_arguments,
)
from cohort.rewards.math import MathReward
from cohort.rewards.overlong import OverlongReward
from cohort.user_code import load_function, suggest

BUILTINS = ("exact", "format", "math", "overlong")
_BUDGET_SHARE = 0.8  # of the deadline, after which the math reward leaves the rest unscored
_FORMS = f"{', '.join(BUILTINS)}, path/to/file.py:function, or package.module:function"


def build_rewards(
    configs: Sequence[RewardConfig], *, base_dir: Path, columns: Collection[str], max_completion_tokens: int
) -> tuple[RewardFunction, ...]:
    """Load and check a run's reward functions. Imports neither torch nor transformers.

    Args:
        configs: the `rewards` section.
        base_dir: folder of the configuration file; relative file names are resolved against it first.
        columns: names of the dataset's columns, including the prompt column.
        max_completion_tokens: maximum completion length of the run.

    Raises:
        UserError: a function fails to load, cannot be called with the dataset's columns, or all rewards are shaping
            only.
    """
    rewards = []
    for i, config in enumerate(configs):
        field = f"rewards[{i}]"
        function = load_reward(
            config.use,
            base_dir=base_dir,
            field=f"{field}.use",
            timeout_s=config.timeout_s,
            max_completion_tokens=max_completion_tokens,
        )
        name = config.name or _name_of(function)
        check_columns(function, name=name, args=config.args, columns=columns, field=field)
        rewards.append(
            RewardFunction(
                name=name,
                function=function,
                weight=config.weight,
                args=config.args,
                timeout_s=config.timeout_s,
                shapes=bool(getattr(function, "shapes", False)),
            )
        )
    if all(reward.shapes for reward in rewards):
        raise UserError(
            f"rewards: {', '.join(repr(r.name) for r in rewards)} only shapes other rewards, and there is no other; "
            f"add one, such as {{use: math}}"
        )
    return tuple(rewards)


def load_reward(
    use: str,
    *,
    base_dir: Path,
    field: str = "rewards[0].use",
    timeout_s: float = 300.0,
    max_completion_tokens: int = 0,
) -> Callable[..., Any]:
    """Return the callable named by `use`.

    Args:
        use: a built-in's name, `path/to/file.py:name`, or `package.module:name`.
        base_dir: folder of the configuration file; files are resolved against it, then the working directory.
        field: name of this setting in messages.
        timeout_s: deadline of a call; the math reward keeps within it.
        max_completion_tokens: maximum completion length of the run, for the overlong reward.

    Raises:
        UserError: no such built-in, file, module or name; an import error; or the object is not callable.
    """
    if ":" not in use:
        return _builtin(use, field=field, timeout_s=timeout_s, max_completion_tokens=max_completion_tokens)
    return load_function(use, base_dir=base_dir, field=field)


def check_columns(
    function: Callable[..., Any],
    *,
    name: str,
    args: Mapping[str, Any],
    columns: Collection[str],
    field: str = "rewards[0]",
) -> None:
    """Check that a function can be called with rollouts, dataset columns and its own arguments.

    Args:
        function: a reward function.
        name: its name in messages.
        args: its extra keyword arguments.
        columns: names of the dataset's columns, including the prompt column.
        field: name of its settings in messages.

    Raises:
        UserError: a required parameter that nothing provides, an unknown argument, an argument with the name of a
            column, or an invalid argument.
    """
    try:
        parameters = keyword_parameters(function)
    except ValueError as error:
        raise UserError(
            f"{field}.use: the signature of reward {name!r} cannot be read ({error}); wrap it in a `def`"
        ) from error
    if parameters.positional_only:
        raise UserError(
            f"{field}.use: reward {name!r} takes {parameters.positional_only[0]!r} by position only, but arguments are "
            "passed by keyword"
        )
    for arg in args:
        if arg in ROLLOUT_NAMES:
            raise UserError(f"{field}.args: {arg!r} is always passed to reward {name!r}; remove it")
        if arg in columns and arg not in reward_arguments(function):
            raise UserError(
                f"{field}.args: {arg!r} is also a column of the dataset, so reward {name!r} would get two values for "
                "it; rename one of them"
            )
    _check_arguments_taken(function, parameters, name, args, field)
    _check_filled(function, parameters, name, args, columns, field)


def _builtin(use: str, *, field: str, timeout_s: float, max_completion_tokens: int) -> Callable[..., Any]:
    match use:
        case "exact":
            return ExactReward()
        case "format":
            return FormatReward()
        case "math":
            return MathReward(budget_s=_BUDGET_SHARE * timeout_s)
        case "overlong":
            return OverlongReward(max_completion_tokens)
    if use.endswith(".py"):
        raise UserError(f"{field}: {use!r} names a file but no function; write '{use}:function'")
    raise UserError(f"{field}: no built-in reward {use!r}. {suggest(use, BUILTINS, 'Built in')} What works: {_FORMS}")


def _check_arguments_taken(
    function: Callable[..., Any], parameters: KeywordParameters, name: str, args: Mapping[str, Any], field: str
) -> None:
    own = reward_arguments(function)
    taken = own or parameters.names - set(ROLLOUT_NAMES)
    for arg in args:
        if arg not in taken and (own or not parameters.has_var_keyword):
            raise UserError(
                f"{field}.args: reward {name!r} takes no argument {arg!r}. {suggest(arg, taken, 'It takes')}"
            )


def _check_filled(
    function: Callable[..., Any],
    parameters: KeywordParameters,
    name: str,
    args: Mapping[str, Any],
    columns: Collection[str],
    field: str,
) -> None:
    required = [(p, f"its parameter {p!r}") for p in parameters.required]
    if isinstance(function, ChecksArguments):
        try:
            needed = function.required_columns(**args)
        except (ValueError, TypeError) as error:
            raise UserError(f"{field}.args: reward {name!r}: {error}") from error
        required += [(column, f"the column {column!r}") for column in needed]
    available = {*ROLLOUT_NAMES, *columns, *args}
    for parameter, described in required:
        if parameter not in available:
            raise UserError(
                f"{field}: reward {name!r} needs {described}, which is neither a column of the dataset nor in "
                f"{field}.args. {suggest(parameter, columns, 'Columns')} Also available: "
                f"{', '.join(ROLLOUT_NAMES)}"
            )


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))
