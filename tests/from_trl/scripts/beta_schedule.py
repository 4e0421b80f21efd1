"""A KL coefficient that falls, set by a callback that knows the trainer."""

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class BetaSchedule(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.beta = args.beta * (1 - state.global_step / state.max_steps)


class Reward:
    __name__ = "length"

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [len(c) * self.scale for c in completions]


args = GRPOConfig("out", max_steps=2, num_generations=2, max_completion_length=4, beta=0.1, logging_steps=1)
trainer = GRPOTrainer("base", Reward(0.1), args, [{"prompt": "hello"}])
trainer.add_callback(BetaSchedule(trainer))
trainer.train()
