"""Load the configured reward functions, built-in ones by name, and check them before any model is loaded."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cohort.config import RewardConfig
from cohort.config.rewards import REWARD_SETTINGS
from cohort.config.user_code import load_function
from cohort.errors import UserError, did_you_mean, suggest
from cohort.records import Trajectory
from cohort.rewards.builtin import BuiltinReward, RewardContext
from cohort.rewards.choice import ChoiceReward
from cohort.rewards.code import CodeReward
from cohort.rewards.function import (
    ON_REQUEST,
    ROLLOUT_NAMES,
    TRL_NAMES,
    ChecksArguments,
    KeywordParameters,
    RewardFunction,
    keyword_parameters,
    name_of,
    reports_of,
    unique_names,
)
from cohort.rewards.json_schema import JsonSchemaReward
from cohort.rewards.judge import JudgeReward
from cohort.rewards.length import CosineReward, LengthReward, OverlongReward
from cohort.rewards.math import AccuracyReward, MathReward, ReasoningAccuracyReward
from cohort.rewards.math_workers import MathWorkers
from cohort.rewards.model import ModelReward
from cohort.rewards.number import NumberReward
from cohort.rewards.reasoning_gym import ReasoningGymReward
from cohort.rewards.text import (
    CodeFormatReward,
    ExactReward,
    ExactSetReward,
    FormatReward,
    RegexReward,
    RepetitionReward,
    TextReward,
    reasoning_steps,
    tag_count,
    think_answer_format,
    think_format,
)
from cohort.sandbox import SharedSandbox

if TYPE_CHECKING:
    from cohort.rewards.isolated import IsolatedReward


class EnvironmentReward(BuiltinReward[str]):
    """The reward of an environment, from its `get_reward()` and `step_reward()` or the value that it returned.

    Its settings are the name of the environment or agent. None for trajectories that it did not score, or that another
    environment of a mixture played.
    """

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """Return one reward per trajectory."""
        return [trajectory.rewards.get(self.settings) for trajectory in trajectories]


# Optional packages are imported in `check` and `__call__`: every run imports these modules.
BUILTINS: Mapping[str, Callable[[Any, RewardContext], BuiltinReward[Any]]] = {
    "choice": ChoiceReward,
    "code": CodeReward,
    "exact": ExactReward,
    "exact_set": ExactSetReward,
    "format": FormatReward,
    "json_schema": JsonSchemaReward,
    "judge": JudgeReward,
    "math": MathReward,
    "model": ModelReward,
    "number": NumberReward,
    "open_r1.accuracy": partial(AccuracyReward, grader="open_r1"),
    "open_r1.code_format": CodeFormatReward,
    "open_r1.cosine": partial(CosineReward, grader="open_r1_latex", counts_tokens=False),
    "open_r1.format": partial(TextReward, score=think_answer_format),
    "open_r1.len": partial(LengthReward, grader="open_r1_latex"),
    "open_r1.reasoning_steps": partial(TextReward, score=reasoning_steps),
    "open_r1.repetition_penalty": RepetitionReward,
    "open_r1.soft_overlong": OverlongReward,
    "open_r1.tag_count": partial(TextReward, score=tag_count),
    "overlong": OverlongReward,
    "reasoning_gym": ReasoningGymReward,
    "regex": RegexReward,
    "trl.accuracy": partial(AccuracyReward, grader="trl"),
    "trl.cosine": partial(CosineReward, grader="trl", counts_tokens=True),
    "trl.reasoning_accuracy": partial(ReasoningAccuracyReward, grader="trl"),
    "trl.repetition_penalty": RepetitionReward,
    "trl.soft_overlong": OverlongReward,
    "trl.think_format": partial(TextReward, score=think_format),
}


_MAX_COLUMNS = 10  # in messages


LoadedReward = Callable[..., Any] | None  # a function of the user's; None for a built-in reward


def load_rewards(configs: Sequence[RewardConfig]) -> tuple[LoadedReward, ...]:
    """Load the user's reward functions, one per entry of `rewards`; None for built-in ones.

    Raises:
        UserError: no such built-in, file, module or name; an import error; or the object is not callable.
    """
    return tuple(load_reward(config, field=f"rewards[{i}].use") for i, config in enumerate(configs))


def load_reward(config: RewardConfig, *, field: str) -> LoadedReward:
    """Load the function that `config.use` names in a file, a module or a child process; None for a built-in reward.

    Args:
        config: settings of the reward.
        field: name of `use` in messages.

    Raises:
        UserError: no such built-in, file, module or name; an import error; or the object is not callable.
    """
    use = config.use
    if config.isolate:
        from cohort.rewards.isolated import IsolatedReward  # its process machinery takes time to import

        return IsolatedReward(config, field=field.removesuffix(".use"))
    if ":" in use:
        return load_function(use, field=field)
    if use in BUILTINS:
        return None
    if use.endswith(".py"):
        raise UserError(f"{field}: {use!r} names a file but no function; write '{use}:function'")
    raise UserError(
        f"{field}: no built-in reward {use!r}{did_you_mean(use, BUILTINS)}; use {', '.join(BUILTINS)}, "
        f"path/to/file.py:function, or package.module:function"
    )


def build_rewards(
    configs: Sequence[RewardConfig],
    *,
    columns: Collection[str],
    max_completion_tokens: int,
    functions: Sequence[LoadedReward] | None = None,
    sandbox: SharedSandbox | None = None,
    device: str = "auto",
    run_folder: Path | None = None,
    given: Sequence[str] = (),
    only: Collection[str] = (),
    ask_servers_first: bool = True,
    num_workers: int | None = None,
) -> tuple[RewardFunction, ...]:
    """Combine a run's reward functions with their settings, and check them. Imports neither torch nor transformers.

    Args:
        configs: the `rewards` section.
        columns: names of the dataset's columns, including the prompt column.
        max_completion_tokens: maximum sampled tokens of a completion, or of a trajectory of several turns.
        functions: the user's functions, from `load_rewards`. Default: load them.
        sandbox: the run's, for the code reward. Default: one of its own.
        device: `hardware.device`, for reward models.
        run_folder: the run's folder, for replies of judges; it may not exist yet.
        given: names of the rewards that environments give; they follow the others, with weight 1.
        only: names of the rewards that `cohort reward --only` wants; gates before them are made too. Default: all.
        ask_servers_first: check that a judge's server answers. False: once a reply is not in its cache.
        num_workers: child processes that grade answers. Default: `workers_per_process()`.

    Raises:
        UserError: a function fails to load, cannot be called with the dataset's columns, or has the name of an
            environment; or all rewards are shaping only.
    """
    own = load_rewards(configs) if functions is None else functions
    context = RewardContext(
        max_completion_tokens=max_completion_tokens,
        sandbox=sandbox or SharedSandbox(),
        device=device,
        run_folder=run_folder,
        ask_servers_first=ask_servers_first,
        math_workers=MathWorkers(count=num_workers),
    )
    # of built-in ones the name is known, and making them may start a sandbox
    names = unique_names([c.name or (c.use if f is None else name_of(f)) for c, f in zip(configs, own, strict=True)])
    wanted = _with_gates(configs, names, only) if only else range(len(configs))
    rewards = []
    for i in wanted:
        reward = _with_settings(own[i], configs[i], context, name=names[i])
        check_columns(reward, columns, field=f"rewards[{i}]")
        if isinstance(reward.function, BuiltinReward):
            with _errors_of(reward, f"rewards[{i}]"):
                reward.function.check()
        if reward.name in given:
            raise UserError(f"rewards[{i}].name: the environment gives a reward {reward.name!r}; use another name")
        rewards.append(reward)
    rewards += [RewardFunction(name=name, function=EnvironmentReward(name, context)) for name in given]
    if rewards and not only and all(reward.shapes for reward in rewards):
        raise UserError(
            f"rewards: {', '.join(repr(r.name) for r in rewards)} only shapes other rewards, and there is no other; "
            f"add one, such as {{use: math}}"
        )
    return tuple(rewards)


def _with_settings(loaded: LoadedReward, config: RewardConfig, context: RewardContext, *, name: str) -> RewardFunction:
    """Return a function, or the built-in reward in its place, with its settings."""
    if loaded is None:
        settings = REWARD_SETTINGS[config.use].model_validate(config.args)
        function: Callable[..., Any] = BUILTINS[config.use](settings, replace(context, timeout_s=config.timeout_s))
    else:
        function = loaded
    return RewardFunction(
        name=name,
        function=function,
        weight=config.weight,
        args={} if loaded is None else config.args,
        timeout_s=cast("IsolatedReward", function).deadline_s if config.isolate else config.timeout_s,
        shapes=bool(reports_of(function).shapes),
        gate=config.gate,
        scale=config.scale,
        clip=config.clip,
        where=config.where,
        per_group=config.per_group,
    )


def load_per_group(
    configs: Sequence[RewardConfig], *, max_completion_tokens: int, num_workers: int
) -> dict[int, RewardFunction]:
    """Load the rewards that score each group by itself, by index, on a rank that scores groups for rank 0.

    Rank 0 has checked them, and sends their names with each call.

    Args:
        configs: the `rewards` section.
        max_completion_tokens: maximum sampled tokens of a completion.
        num_workers: child processes that grade answers.

    Raises:
        UserError: a function cannot be loaded here.
    """
    context = RewardContext(
        max_completion_tokens=max_completion_tokens,
        sandbox=SharedSandbox(),  # none of these uses it
        math_workers=MathWorkers(count=num_workers),
    )
    rewards = {}
    for i, config in enumerate(configs):
        if config.per_group or _is_built_in_per_group(config.use):
            own = load_reward(config, field=f"rewards[{i}].use")
            rewards[i] = _with_settings(own, config, context, name=config.name or config.use)
    return rewards


def _is_built_in_per_group(use: str) -> bool:
    """Whether a built-in reward scores each group by itself, without making it: that may start a sandbox."""
    kind: Any = BUILTINS.get(use)
    return bool(getattr(getattr(kind, "func", kind), "per_group", False))


@contextmanager
def _errors_of(reward: RewardFunction, field: str) -> Iterator[None]:
    """Name the reward in errors about its arguments."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(f"{field}.args: reward {reward.name!r}: {error}") from error


def _with_gates(configs: Sequence[RewardConfig], names: Sequence[str], only: Collection[str]) -> list[int]:
    """Return the numbers of some rewards and of the gates that they are behind."""
    for name in only:
        if name not in names:
            raise UserError(f"--only: there is no reward {name!r}{suggest(name, names, 'Rewards')}")
    last = max(names.index(name) for name in only)
    return [i for i, config in enumerate(configs) if names[i] in only or (config.gate and i < last)]


def read_trajectories(functions: Sequence[LoadedReward]) -> bool:
    """Return whether a user's reward function names `trajectories` or `environments` among its parameters."""
    for function in functions:
        with suppress(ValueError):  # no signature, which `check_columns` refuses
            if function is not None and keyword_parameters(function).names.intersection(ON_REQUEST):
                return True
    return False


def check_columns(reward: RewardFunction, columns: Collection[str], *, field: str) -> None:
    """Check that a function can be called with rollouts, dataset columns and its own arguments.

    Args:
        reward: the function with its settings.
        columns: names of the dataset's columns, including the prompt column.
        field: name of the settings in messages.

    Raises:
        UserError: a required parameter that nothing provides, an unknown argument, an argument with the name of a
            column, or an invalid argument.
    """
    name = reward.name
    for column in reward.where:
        if column not in columns:
            raise UserError(
                f"{field}.where: {column!r} is not a column of the dataset{suggest(column, columns, 'Columns')}"
            )
    try:
        parameters = keyword_parameters(reward.function)
    except ValueError as error:
        raise UserError(
            f"{field}.use: the signature of reward {name!r} cannot be read ({error}); wrap it in a `def`"
        ) from error
    if parameters.positional_only:
        raise UserError(
            f"{field}.use: reward {name!r} takes {parameters.positional_only[0]!r} by position only, but arguments are "
            "passed by keyword"
        )
    for refused in ON_REQUEST:
        if reward.per_group and refused in parameters.names:
            raise UserError(
                f"{field}.per_group: reward {name!r} takes {refused!r}, which stay in the process of rank 0; remove "
                "the parameter, or set per_group: false"
            )
    own = _own_arguments(reward.function)
    allowed = own or parameters.names - set(ROLLOUT_NAMES)
    for arg in reward.args:
        if arg in (*ROLLOUT_NAMES, *TRL_NAMES):
            raise UserError(f"{field}.args: {arg!r} is always passed to reward {name!r}; remove it")
        if arg in columns:
            raise UserError(
                f"{field}.args: {arg!r} is also a column of the dataset, so reward {name!r} would get two values for "
                "it; rename one of them"
            )
        if arg not in allowed and (own or not parameters.has_var_keyword):
            raise UserError(
                f"{field}.args: reward {name!r} takes no argument {arg!r}{suggest(arg, sorted(allowed), 'It takes')}"
            )
    _check_required(reward, parameters, columns, field)


def _own_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's own `args` if it implements `ChecksArguments`; else none."""
    return keyword_parameters(function.required_columns).names if isinstance(function, ChecksArguments) else frozenset()


def _check_required(
    reward: RewardFunction, parameters: KeywordParameters, columns: Collection[str], field: str
) -> None:
    """Check that everything the function requires is available."""
    is_builtin = isinstance(reward.function, BuiltinReward)
    required = [(p, f"its parameter {p!r}") for p in parameters.required if not is_builtin]
    if isinstance(reward.function, ChecksArguments):
        with _errors_of(reward, field):
            needed = reward.function.required_columns(**reward.args)
        required += [(column, f"the column {column!r}") for column in needed]
    available = {*ROLLOUT_NAMES, *ON_REQUEST, *TRL_NAMES, *columns, *reward.args}
    for parameter, described in required:
        if parameter not in available:
            names = list(columns)
            shown = ", ".join(names[:_MAX_COLUMNS]) or "none"
            more = f" and {len(names) - _MAX_COLUMNS} more" if len(names) > _MAX_COLUMNS else ""
            raise UserError(
                f"{field}: reward {reward.name!r} needs {described}, which is neither a column of the dataset nor in "
                f"{field}.args{did_you_mean(parameter, available) or '.'} Columns: {shown}{more}; also available: "
                f"{', '.join((*ROLLOUT_NAMES, *TRL_NAMES))}"
            )
