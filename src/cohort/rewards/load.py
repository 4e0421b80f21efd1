"""Finds the reward functions that a configuration names, and judges them before any model is loaded."""

import difflib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards.describe import raised_at
from cohort.rewards.exact import ExactReward
from cohort.rewards.format import FormatReward
from cohort.rewards.function import (
    ROLLOUT_NAMES,
    ChecksArguments,
    RewardFunction,
    Wanted,
    own_arguments,
    wanted_arguments,
)
from cohort.rewards.math import MathReward

BUILTINS = ("exact", "format", "math")
_BUDGET_SHARE = 0.8  # of the deadline that the math reward spends before it leaves the rest unjudged
_FORMS = f"{', '.join(BUILTINS)}, path/to/file.py:function, or package.module:function"


def build_rewards(
    configs: Sequence[RewardConfig], *, base_dir: Path, columns: Collection[str]
) -> tuple[RewardFunction, ...]:
    """The reward functions of a run, loaded and checked. Imports neither torch nor transformers of itself.

    Args:
        configs: the section `rewards`.
        base_dir: folder of the configuration file; relative file names are looked up there first.
        columns: names of the dataset's columns, without the prompt column.

    Raises:
        UserError: a function does not load, or cannot be called with what the dataset has.
    """
    rewards = []
    for i, config in enumerate(configs):
        field = f"rewards[{i}]"
        function = load_reward(config.use, base_dir=base_dir, field=f"{field}.use", timeout_s=config.timeout_s)
        name = config.name or _name_of(function)
        check_columns(function, name=name, args=config.args, columns=columns, field=field)
        rewards.append(
            RewardFunction(
                name=name, function=function, weight=config.weight, args=config.args, timeout_s=config.timeout_s
            )
        )
    return tuple(rewards)


def load_reward(
    use: str, *, base_dir: Path, field: str = "rewards[0].use", timeout_s: float = 300.0
) -> Callable[..., Any]:
    """The callable that `use` names.

    Args:
        use: a built-in's name, `path/to/file.py:name`, or `package.module:name`.
        base_dir: folder of the configuration file; a file is looked up there and then in the working directory.
        field: what to call this setting in messages.
        timeout_s: deadline of a call; the math reward keeps within it.

    Raises:
        UserError: no such built-in, file, module or name in it; it does not import; or it is not callable.
    """
    where, _, name = use.rpartition(":")
    if not where:
        return _builtin(use, field=field, timeout_s=timeout_s)
    is_file = where.endswith(".py") or "/" in where
    module = _module_of_file(where, base_dir, use, field) if is_file else _module(where, use, field)
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"{field}: {use!r}: {where} has no {name!r}. {_nearest(name, public, 'Callable in it')}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{field}: {use!r} is not callable, it is {function!r} ({type(function).__name__})")
    if isinstance(function, type):
        raise UserError(
            f"{field}: {use!r} is a class; name an instance of it that can be called, for example "
            f"`my_reward = {name}()` in {where}"
        )
    return function


def check_columns(
    function: Callable[..., Any],
    *,
    name: str,
    args: Mapping[str, Any],
    columns: Collection[str],
    field: str = "rewards[0]",
) -> None:
    """Checks that the function can be called with what there is: rollouts, dataset columns and its own arguments.

    Args:
        function: a reward function.
        name: what to call it in messages.
        args: its extra keyword arguments.
        columns: names of the dataset's columns, without the prompt column.
        field: what to call its settings in messages.

    Raises:
        UserError: a required parameter that nothing fills, an argument that the function does not take, an argument
            with the name of a column, or an argument that does not work.
    """
    try:
        wanted = wanted_arguments(function)
    except ValueError as error:
        raise UserError(
            f"{field}.use: the signature of reward {name!r} cannot be read ({error}); wrap it in a `def`"
        ) from error
    if wanted.positional_only:
        raise UserError(
            f"{field}.use: reward {name!r} takes {wanted.positional_only[0]!r} by position only; every argument is "
            "passed by keyword"
        )
    for arg in args:
        if arg in ROLLOUT_NAMES:
            raise UserError(f"{field}.args: {arg!r} is always passed to reward {name!r} by the run; remove it here")
        if arg in columns and arg not in own_arguments(function):
            raise UserError(
                f"{field}.args: {arg!r} is a column of the dataset too, so reward {name!r} would get two values for "
                "it; rename one of them"
            )
    _check_arguments_taken(function, wanted, name, args, field)
    _check_filled(function, wanted, name, args, columns, field)


def _builtin(use: str, *, field: str, timeout_s: float) -> Callable[..., Any]:
    match use:
        case "exact":
            return ExactReward()
        case "format":
            return FormatReward()
        case "math":
            return MathReward(budget_s=_BUDGET_SHARE * timeout_s)
    if use.endswith(".py"):
        raise UserError(f"{field}: {use!r} names a file but no function in it; write '{use}:function'")
    raise UserError(f"{field}: no built-in reward {use!r}. {_nearest(use, BUILTINS, 'Built in')} What works: {_FORMS}")


def _module_of_file(path: str, base_dir: Path, use: str, field: str) -> ModuleType:
    candidates = [base_dir / path, Path.cwd() / path]
    found = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if found is None:
        tried = " and ".join(dict.fromkeys(str(candidate) for candidate in candidates))
        beside = sorted({file.name for candidate in candidates for file in candidate.parent.glob("*.py")})
        raise UserError(f"{field}: {use!r}: no such file. Tried {tried}. {_nearest(path, beside, 'Files there')}")
    # One module per file, so that two rewards from one file share its state and its code runs once.
    module_name = f"cohort_reward_file_{found.stem}_{zlib.crc32(str(found).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _importable(found.parent)
    spec = importlib.util.spec_from_file_location(module_name, found)
    if spec is None or spec.loader is None:
        raise UserError(f"{field}: {use!r}: {found} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        raise _import_error(error, use, field) from error
    return module


def _module(name: str, use: str, field: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself or a package that holds it, and not something that it imports.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{field}: {use!r}: there is no module {error.name!r} among the installed packages or in the working "
                f"directory {Path.cwd()}. For a file, write 'path/to/file.py:function'"
            ) from error
        raise _import_error(error, use, field) from error
    except BaseException as error:
        raise _import_error(error, use, field) from error


def _import_error(error: BaseException, use: str, field: str) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    return UserError(f"{field}: {use!r} does not import: {type(error).__name__}: {error} (at {raised_at(error)})")


def _importable(folder: Path) -> None:
    """Lets reward code import its neighbours; last in line, so that no neighbour hides an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _check_arguments_taken(
    function: Callable[..., Any], wanted: Wanted, name: str, args: Mapping[str, Any], field: str
) -> None:
    own = own_arguments(function)
    taken = own or wanted.names - set(ROLLOUT_NAMES)
    for arg in args:
        if arg not in taken and (own or not wanted.takes_any):
            raise UserError(
                f"{field}.args: reward {name!r} takes no argument {arg!r}. {_nearest(arg, taken, 'It takes')}"
            )


def _check_filled(
    function: Callable[..., Any],
    wanted: Wanted,
    name: str,
    args: Mapping[str, Any],
    columns: Collection[str],
    field: str,
) -> None:
    required = [(p, f"its parameter {p!r}") for p in wanted.required]
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
                f"{field}.args. {_nearest(parameter, columns, 'Columns')} Besides columns there are "
                f"{', '.join(ROLLOUT_NAMES)}"
            )


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))


def _nearest(wrong: str, right: Iterable[str], what: str) -> str:
    """`Did you mean 'x'? What: a, b, c.`"""
    known = sorted(right)
    close = difflib.get_close_matches(wrong, known, n=1)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"{what}: {', '.join(known) or 'none'}."
