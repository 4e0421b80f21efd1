"""Several tasks in one dataset: None for the rows of other tasks."""

import re


def math_task_reward(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, kind in zip(prompts, completions, task, strict=True):
        if kind != "math":
            rewards.append(None)
            continue
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        rewards.append(1.0 if str(a + b) in re.findall(r"-?\d+", completion) else 0.0)
    return rewards


def everything_by_name(**kwargs):
    """Takes nothing but keywords, and says of each argument how many entries it has."""
    texts = kwargs["completions"]
    lists = {name: len(value) for name, value in kwargs.items() if isinstance(value, list)}
    assert set(lists.values()) == {len(texts)}, lists
    others = sorted(kwargs.keys() - lists.keys())
    return [len(lists) + 0.01 * len(others) + 0.001 * len(",".join([*sorted(lists), *others]))] * len(texts)


class Suite:
    """Rewards with weights; the bound method is the reward."""

    def __init__(self, **weights):
        self.weights = weights

    def polite(self, text):
        return float(any(word in text.lower() for word in ("please", "thank", "sorry")))

    def brief(self, text):
        return 1 / (1 + len(text.split()))

    def total(self, prompts, completions, **kwargs):
        return map(self.weighted, completions)

    def weighted(self, text):
        return sum(weight * getattr(self, name)(text) for name, weight in self.weights.items())


suite = Suite(polite=0.7, brief=0.3)


def rank_reward(completions, **kwargs):
    kwargs.pop("task", None)
    longest_first = sorted(completions, key=len, reverse=True)
    return {i: -longest_first.index(completion) / 10 for i, completion in enumerate(completions)}.values()
