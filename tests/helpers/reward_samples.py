"""Reward functions and groups of completions for them."""

import numpy as np

from cohort.records import Prompt, RolloutGroup
from cohort.rewards import RewardFunction, RewardRunner
from samples import answer


def group(content, texts, *, prompt_id=0, **columns):
    prompt = Prompt(id=prompt_id, epoch=0, content=content, token_ids=np.array([1, 2]), columns=columns)
    trajectories = tuple(answer(prompt, [10 + i, 20 + i], text=text) for i, text in enumerate(texts))
    return RolloutGroup(prompt=prompt, trajectories=trajectories)


def reward(function, *, name="r", **settings):
    return RewardFunction(name=name, function=function, **settings)


def score_texts(function, texts, **settings):
    """Rewards of one group by one function, as a list."""
    return RewardRunner([reward(function, **settings)]).score([group("q", texts)])[0].rewards.tolist()


MESSAGES = [{"role": "user", "content": "2+2?"}]
