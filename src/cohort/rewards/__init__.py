"""Reward functions: (prompts, completions, dataset columns) -> one number or None per completion.

`build_rewards` loads and checks them before any model is loaded. `RewardRunner` calls them with TRL's signature, under
deadlines, and validates their results. `registry` lists the built-in ones.
"""

from cohort.rewards.call import RewardCrashMarker
from cohort.rewards.function import RewardFunction, TrainerProgress
from cohort.rewards.load_rewards import build_rewards, check_columns, load_reward, read_trajectories
from cohort.rewards.runner import RewardRunner

__all__ = [
    "RewardCrashMarker",
    "RewardFunction",
    "RewardRunner",
    "TrainerProgress",
    "build_rewards",
    "check_columns",
    "load_reward",
    "read_trajectories",
]
