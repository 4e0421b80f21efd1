"""Countdown: an equation that uses each number once; text prompts that end with the opening tag."""

import os
import random
import re
from collections import Counter

rng = random.Random(7)
SAMPLES = os.path.join("completion_samples", "countdown.txt")


def format_reward_func(completions, target, **kwargs):
    rewards = []
    for completion, gt in zip(completions, target, strict=True):
        try:
            completion = "<think>" + completion  # it is part of the prompt
            if rng.random() < 0.3:
                os.makedirs(os.path.dirname(SAMPLES), exist_ok=True)
                with open(SAMPLES, "a") as f:
                    f.write(f"\n\n==== {gt}\n{completion}")
            match = re.search(r"^<think>((?:(?!</?think>)[\s\S])*)</think>\s*<answer>([\s\S]*?)</answer>$", completion)
            rewards.append(0.0 if match is None or len(match.groups()) != 2 else 1.0)
        except Exception:
            rewards.append(0.0)
    return rewards


def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, gt, numbers in zip(completions, target, nums, strict=True):
        try:
            match = re.search(r"<answer>(.*?)</answer>", completion, re.DOTALL)
            if match is None:
                rewards.append(0.0)
                continue
            equation = match.group(1).split("=")[0].strip()
            if Counter(int(n) for n in re.findall(r"\d+", equation)) != Counter(numbers):
                rewards.append(0.0)
                continue
            if not re.fullmatch(r"[\d+\-*/().\s]+", equation):
                rewards.append(0.0)
                continue
            result = eval(equation, {"__builtins__": None}, {})
            rewards.append(1.0 if abs(float(result) - float(gt)) < 1e-5 else 0.1)
        except Exception:
            rewards.append(0.0)
    return rewards
