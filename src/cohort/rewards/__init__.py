"""Reward functions: (prompts, completions, dataset columns) -> one number or None per completion.

`load_rewards` and `build_rewards` load and check them before any model is loaded. `RewardRunner` calls them with TRL's
signature, under deadlines, and validates their results. `load_rewards.BUILTINS` lists the built-in ones.
"""

from cohort.rewards.function import RewardFunction, TrainerProgress
from cohort.rewards.load_rewards import (
    LoadedReward,
    build_rewards,
    check_columns,
    load_reward,
    load_rewards,
    read_trajectories,
)
from cohort.rewards.runner import RewardRunner

__all__ = [
    "LoadedReward",
    "RewardFunction",
    "RewardRunner",
    "TrainerProgress",
    "build_rewards",
    "check_columns",
    "load_reward",
    "load_rewards",
    "read_trajectories",
]
