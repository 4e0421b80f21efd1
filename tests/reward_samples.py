"""Reward functions and groups of completions for them."""

import numpy as np

from cohort.records import Completion, Prompt, RolloutGroup
from cohort.rewards import RewardFunction, RewardRunner


def group(content, texts, *, prompt_id=0, **columns):
    prompt = Prompt(id=prompt_id, epoch=0, content=content, token_ids=np.array([1, 2]), columns=columns)
    completions = tuple(
        Completion(
            token_ids=np.array([10 + i, 20 + i]),
            sampling_logprobs=np.zeros(2),
            finish_reason="stop",
            policy_version=0,
            text=text,
        )
        for i, text in enumerate(texts)
    )
    return RolloutGroup(prompt=prompt, completions=completions)


def reward(function, *, name="r", **settings):
    return RewardFunction(name=name, function=function, **settings)


def score_texts(function, texts, **settings):
    """Rewards of one group by one function, as a list."""
    return RewardRunner([reward(function, **settings)]).score([group("q", texts)])[0].rewards.tolist()


MESSAGES = [{"role": "user", "content": "2+2?"}]
