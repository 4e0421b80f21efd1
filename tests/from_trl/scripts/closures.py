"""Rewards from a factory, a partial and a lambda."""

from functools import partial

from trl import GRPOConfig, GRPOTrainer


def make_length_reward(target):
    def length_reward(completions, **kwargs):
        return [-abs(len(c) - target) / target for c in completions]

    return length_reward


def contains(completions, word, **kwargs):
    return [float(word in c) for c in completions]


trainer = GRPOTrainer(
    model="base",
    reward_funcs=[
        make_length_reward(4),
        partial(contains, word="1"),
        lambda completions, **kwargs: [0.0] * len(completions),
    ],
    args=GRPOConfig("out", max_steps=2, num_generations=2, max_completion_length=4, reward_weights=[1.0, 0.5, 0.0]),
    train_dataset=[{"prompt": "1 2 3"}, {"prompt": "3 2 1"}],
)
trainer.train()
