"""Rewards that change during training, and what they log."""

import csv
import logging
import os

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)
LOG_PATH = os.environ.get("LOG_PATH", "rewards_log.csv")
calls = 0


def curriculum_reward(completions, trainer_state=None, **kwargs):
    """The target length grows with the progress of training."""
    progress = trainer_state.global_step / max(1, trainer_state.max_steps) if trainer_state else 0.0
    target = 20 + 60 * progress
    logger.info("step %s: target %.1f", trainer_state and trainer_state.global_step, target)
    return [-abs(target - len(completion)) / target for completion in completions]


def annealed_reward(completions, **kwargs):
    global calls
    calls += 1
    weight = 0.5**calls
    with open(LOG_PATH, "a", newline="") as file:
        writer = csv.writer(file)
        for completion in completions:
            writer.writerow([calls, weight, completion])
    return [weight * (1.0 if completion.strip() else -1.0) for completion in completions]


def logged_reward(completions, reference, log_extra=None, log_metric=None, **kwargs):
    overlaps = []
    for completion, wanted in zip(completions, reference, strict=True):
        words, gold = set(completion.lower().split()), set(wanted.lower().split())
        overlaps.append(len(words & gold) / len(gold))
    if log_extra:
        log_extra("overlap", [f"{overlap:.2f}" for overlap in overlaps])
        log_extra("empty", ["yes" if not completion else None for completion in completions])
    if log_metric:
        log_metric("overlap/mean", sum(overlaps) / len(overlaps))
        log_metric("overlap/max", max(overlaps))
        log_metric("overlap/max", 0)
    return overlaps


class WarmupReward:
    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.seen = 0
        self.__name__ = self.__class__.__name__

    def __call__(self, prompts, completions, **kwargs):
        step = kwargs["trainer_state"].global_step
        self.seen += len(completions)
        scale = min(1.0, (step + 1) / self.warmup_steps)
        return [scale * len(completion.split()) + self.seen / 1000 for completion in completions]


warmup_reward = WarmupReward(warmup_steps=2)
