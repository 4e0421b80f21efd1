"""Arguments of reward functions: prompts, completions and columns, with one entry for each completion."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from cohort.chat import append_observation
from cohort.records import Prompt, Trajectory
from cohort.rewards.builtin import BuiltinReward
from cohort.rewards.completion_text import TurnsText, last_text
from cohort.rewards.function import ON_REQUEST, ROLLOUT_NAMES, KeywordParameters, RewardFunction

Sample = tuple[Prompt, Trajectory]


def rollout_arguments(
    reward: RewardFunction,
    samples: Sequence[Sample],
    *,
    parameters: KeywordParameters,
    columns: Collection[str],
    prompt_column: str | None,
) -> dict[str, Any]:
    """Build the arguments that depend on completions. Lists are fresh, so that functions cannot modify each other's.

    Args:
        reward: the function.
        samples: what it scores.
        parameters: its own.
        columns: names of the dataset's columns; one missing from all rows is passed as all None.
        prompt_column: column with the prompts, passed as in the dataset.
    """
    function = reward.function
    names = dict.fromkeys((*columns, *(name for prompt, _ in samples for name in prompt.columns)))
    if isinstance(function, BuiltinReward):
        if function.per_group:  # it may be called in another process, which gets no other columns
            names = dict.fromkeys(name for name in function.required_columns() if name in names)
        of_samples = SampleColumns(samples, names, prompt_column)
        wanted = parameters.names
        return {n: of_samples if n == "columns" else [_OF_BUILTIN[n](*p) for p in samples] for n in wanted}
    of_samples = SampleColumns(samples, names, prompt_column)
    arguments: dict[str, Any] = {
        name: of_samples[name] for name in of_samples if parameters.accepts(name, unless=_ONE_EACH)
    }
    for name, of_rollout in _ROLLOUT_ARGUMENTS.items():
        if parameters.accepts(name):
            arguments[name] = [of_rollout(*p) for p in samples]
    for name, of_trajectory in _TRAJECTORY_ARGUMENTS.items():
        values = [of_trajectory(trajectory) for _, trajectory in samples]
        is_given = name == "environments" and any(value is not None for value in values)
        if name not in arguments and (parameters.accepts(name) if is_given else name in parameters.names):
            arguments[name] = values
    return arguments


class SampleColumns(Mapping[str, list[Any]]):
    """Columns with one entry per completion, made when they are asked for: large data stay on disk."""

    def __init__(self, samples: Sequence[Sample], names: Collection[str], prompt_column: str | None):
        self._samples, self._names, self._prompt_column = samples, names, prompt_column

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._names:
            raise KeyError(name)
        if name == self._prompt_column:
            return [_prompt(*sample) for sample in self._samples]
        return [prompt.columns.get(name) for prompt, _ in self._samples]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def _prompt(prompt: Prompt, trajectory: Trajectory) -> Any:
    content = append_observation(prompt.content, trajectory.observation) if trajectory.observation else prompt.content
    return content if isinstance(content, str) else [dict(message) for message in content]


def _completion(prompt: Prompt, trajectory: Trajectory) -> Any:
    is_text = isinstance(prompt.content, str)
    return trajectory.text if is_text else [dict(message) for message in trajectory.messages]


def _completion_for_builtin(prompt: Prompt, trajectory: Trajectory) -> Any:
    completion = _completion(prompt, trajectory)
    is_several = isinstance(completion, str) and len(trajectory.messages) > 1
    return TurnsText(completion, last_text(trajectory.messages)) if is_several else completion


def _completion_ids(_: Prompt, trajectory: Trajectory) -> Any:
    return trajectory.sampled_token_ids.tolist()


_ONE_EACH = (
    "prompt",
    "completion",
    "completion_ids",
)  # names of columns that only functions which name them get, as in TRL
_ROLLOUT_ARGUMENTS: Mapping[str, Callable[[Prompt, Trajectory], Any]] = dict(
    zip(ROLLOUT_NAMES, (_prompt, _completion, _completion_ids), strict=True)
)


_OF_BUILTIN: Mapping[str, Callable[[Prompt, Trajectory], Any]] = {
    **_ROLLOUT_ARGUMENTS,
    "completions": _completion_for_builtin,
    "trajectories": lambda prompt, trajectory: trajectory,
}
_TRAJECTORY_ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = dict(
    zip(ON_REQUEST, (lambda trajectory: trajectory, lambda trajectory: trajectory.environment), strict=True)
)
