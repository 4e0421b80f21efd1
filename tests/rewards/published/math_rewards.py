"""Answers in LaTeX: math_verify, and SymPy under a time limit."""

import re
import signal
from contextlib import contextmanager

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import simplify

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
ANSWER_CONFIG = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
]


def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    rewards = []
    for completion, sol in zip(completions, solution, strict=True):
        gold = parse(sol, extraction_mode="first_match")
        if len(gold) == 0:
            print("no gold answer in", sol)
            rewards.append(None)  # skip this example
            continue
        try:
            predicted = parse(completion[0]["content"], extraction_config=ANSWER_CONFIG, extraction_mode="first_match")
            rewards.append(float(verify(gold, predicted)))
        except Exception as e:
            print(f"verify failed: {e}")
            rewards.append(0.0)
    return rewards


@contextmanager
def time_limit(seconds):
    def on_alarm(signum, frame):
        raise TimeoutError("took too long")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def last_box(text):
    found = BOXED.findall(text)
    return found[-1] if found else None


def symbolic_reward(completions, solution, **kwargs):
    rewards = []
    for completion, sol in zip(completions, solution, strict=True):
        try:
            with time_limit(20):
                difference = simplify(latex2sympy(last_box(completion[-1]["content"])) - latex2sympy(last_box(sol)))
                rewards.append(1.0 if difference == 0 else -0.5)
        except:  # noqa: E722  (as people write it)
            rewards.append(-1.0)
    return rewards
