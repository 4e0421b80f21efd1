"""Built-in rewards as functions, without torch."""

import inspect
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

from cohort.config import RewardConfig, config_from_dict
from cohort.config.rewards import REWARD_SETTINGS
from cohort.rewards.builtin import BuiltinReward, RewardContext
from cohort.rewards.load_rewards import BUILTINS
from cohort.rewards.math_workers import MathWorkers
from cohort.sandbox import Sandbox, SharedSandbox

math_workers = cache(MathWorkers)  # they take a second to start


def configured(*rewards: Any) -> tuple[RewardConfig, ...]:
    """The section `rewards` of a configuration."""
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}}
    return config_from_dict({**sections, "rewards": list(rewards)}).rewards


def load_builtin(
    name: str,
    args: Any = None,
    *,
    workers: Any = None,
    budget_s: float = 240.0,
    sandbox: Any = None,
    **context: Any,
) -> BuiltinReward[Any]:
    """A built-in reward for completions of up to 100 tokens; all that grade answers share worker processes."""
    settings = REWARD_SETTINGS[name].model_validate(args or {})
    if isinstance(sandbox, Sandbox):
        sandbox = SimpleNamespace(open=lambda opened=sandbox: opened)
    options = {"max_completion_tokens": 100, "timeout_s": budget_s / 0.8, "sandbox": sandbox or SharedSandbox()}
    reward = BUILTINS[name](settings, RewardContext(**{**options, **context}))
    if hasattr(reward, "workers"):
        reward.workers = workers or math_workers()
    return reward


def call(reward: BuiltinReward[Any], completions: Any = None, **inputs: Any) -> Any:
    """Call a reward with what it takes of some inputs; those with other names are columns."""
    given = {"completions": completions, **inputs}
    names = inspect.signature(reward).parameters
    rollout = ("prompts", "completions", "completion_ids", "trajectories")
    columns = {name: values for name, values in inputs.items() if name not in rollout}
    return reward(**{name: columns if name == "columns" else given.get(name) for name in names})


class Builtin:
    """A reward whose calls take its settings, too: `Builtin("regex")(["a cat"], pattern="cat")`."""

    def __init__(self, name: str, args: Any = None, **context: Any) -> None:
        self._kind, self._args = REWARD_SETTINGS[name], args or {}
        self._make = partial(load_builtin, name, **context)

    @cached_property
    def function(self) -> BuiltinReward[Any]:
        """The reward itself."""
        return self._make(self._args)

    def __call__(self, completions: Any = None, **inputs: Any) -> Any:
        names = [field.alias or name for name, field in self._kind.model_fields.items()]
        args = {**self._args, **{name: inputs.pop(name) for name in names if name in inputs}}
        if "function" not in vars(self):
            self.function = self._make(args)
        self.function.settings = self._kind.model_validate(args)
        return call(self.function, completions, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)
