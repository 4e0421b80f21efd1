"""Reward functions: (prompts, completions, dataset columns) -> one number or None per completion.

`build_rewards` finds and checks them before any model is loaded; `RewardRunner` calls them with TRL's signature,
under deadlines, and validates what they return. Built in are `math`, `exact` and `format`.
"""

from cohort.rewards.function import ChecksArguments, RewardFunction
from cohort.rewards.load import BUILTINS, build_rewards, check_columns, load_reward
from cohort.rewards.marker import RewardMarker
from cohort.rewards.runner import RewardRunner

__all__ = [
    "BUILTINS",
    "ChecksArguments",
    "RewardFunction",
    "RewardMarker",
    "RewardRunner",
    "build_rewards",
    "check_columns",
    "load_reward",
]
