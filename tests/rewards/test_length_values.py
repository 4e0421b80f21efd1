"""Rewards by length and repetition: ten literal values each."""

import pytest

from builtin_rewards import Builtin

# Texts whose box is right or wrong, by length in characters; the shortest is a box alone.
RIGHT = {length: r"\boxed{1}".ljust(length, ".") for length in (9, 10, 20, 25, 30, 50, 59, 75, 100, 150, 200)}
WRONG = {length: r"\boxed{2}".ljust(length, ".") for length in (10, 20, 25, 30, 50, 59, 75, 100, 150, 200)}


def tokens(*lengths):
    return {"completion_ids": [list(range(length)) for length in lengths]}


def texts(*completions, solution="$1$"):
    return {"completions": list(completions), "completion_ids": [[]] * 10, "solution": [solution] * 10}


LENGTHS = tokens(0, 1, 79, 80, 81, 85, 90, 99, 100, 130)  # of at most 100
FALLING = [0.0, 0.0, 0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0]
WIDE = {"buffer_tokens": 50, "penalty": 2.0}
# from 0.5 for the shortest text of the call to -0.5 for the longest; at most 0 for wrong ones
BY_LENGTH = texts(
    *(RIGHT[9], WRONG[10], RIGHT[10], WRONG[20], RIGHT[20], RIGHT[25], WRONG[30], RIGHT[50], WRONG[50], RIGHT[59])
)
# Open-R1 counts characters, and the cosine rises again; TRL counts tokens up to the limit
CHARACTERS = texts(*(RIGHT[n] for n in (20, 25, 50, 75, 100, 150, 200)), *(WRONG[n] for n in (25, 100, 200)))
SHORT = texts(*[RIGHT[9]] * 6, *[WRONG[10]] * 4) | tokens(0, 25, 50, 100, 150, 200, 0, 25, 100, 200)
HIGH = 0.9267766952966369
WORDS = texts(
    "", "one", "one two", "one one one", "One one ONE", "a b a b", "a b c a b c", "a b c d", "x " * 11, "a, a a"
)
IDS = [[], [1], [1, 2], [1, 1], [1, 1, 1], [1, 2, 1, 2], [1, 2, 3, 1, 2, 3], [7] * 11, [1, 2, 3, 4], [5, 5, 6, 6]]


@pytest.mark.parametrize(
    ("use", "args", "inputs", "expected"),
    [
        ("overlong", {"buffer_tokens": 20}, LENGTHS, FALLING),
        ("overlong", WIDE, LENGTHS, [0.0, 0.0, -1.16, -1.2, -1.24, -1.4, -1.6, -1.96, -2.0, -2.0]),
        ("open_r1.soft_overlong", {"max_completion_len": 100, "soft_punish_cache": 20}, LENGTHS, FALLING),
        ("trl.soft_overlong", {"max_completion_len": 100, "soft_punish_cache": 20}, LENGTHS, FALLING),
        ("trl.soft_overlong", {"max_completion_len": 99, "soft_punish_cache": 0}, LENGTHS, [0.0] * 8 + [-1.0] * 2),
        ("open_r1.len", {}, BY_LENGTH, [0.5, 0.0, 0.48, 0.0, 0.28, 0.18, 0.0, -0.32, -0.32, -0.5]),
        (
            "open_r1.cosine",
            {"max_len": 100},
            CHARACTERS,
            [0.9522542485937369, HIGH, 0.75, 0.5732233047033631, 0.5, 0.75, 1.0, -HIGH, -0.5, -1.0],
        ),
        ("trl.cosine", {"max_len": 100}, SHORT, [1.0, HIGH, 0.75, 0.5, 0.5, 0.5, -1.0, -HIGH, -0.5, -0.5]),
        (
            "open_r1.repetition_penalty",
            {"ngram_size": 2, "max_penalty": -1.0},
            WORDS,
            [0.0, 0.0, 0.0, -0.5, -0.5, -1 / 3, -0.4, 0.0, -0.9, 0.0],
        ),
        (
            "trl.repetition_penalty",
            {"ngram_size": 2, "max_penalty": -2.0},
            {"completion_ids": IDS},
            [0.0, 0.0, 0.0, 0.0, -1.0, -2 / 3, -0.8, -1.8, 0.0, 0.0],
        ),
    ],
)
def test_values(use, args, inputs, expected):
    assert Builtin(use)(**inputs, **args) == pytest.approx(expected, abs=1e-12)
