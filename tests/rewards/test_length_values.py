"""Rewards by length and repetition: ten literal values each."""

import pytest

from builtin_rewards import Builtin

# Texts whose box is right or wrong, by length in characters; the shortest is a box alone.
RIGHT = {length: r"\boxed{1}".ljust(length, ".") for length in (9, 10, 20, 25, 30, 50, 59, 75, 100, 150, 200)}
WRONG = {length: r"\boxed{2}".ljust(length, ".") for length in (10, 20, 25, 30, 50, 59, 75, 100, 150, 200)}


def values(use, **arguments):
    return Builtin(use)(**arguments)


def tokens(*lengths):
    return [list(range(length)) for length in lengths]


def test_overlong():
    ids = tokens(0, 1, 79, 80, 81, 85, 90, 99, 100, 130)
    assert values("overlong", completion_ids=ids, buffer_tokens=20) == [
        0.0, 0.0, 0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0,
    ]  # fmt: skip
    assert values("overlong", completion_ids=ids, buffer_tokens=50, penalty=2.0) == pytest.approx(
        [0.0, 0.0, -1.16, -1.2, -1.24, -1.4, -1.6, -1.96, -2.0, -2.0], abs=1e-12
    )


@pytest.mark.parametrize("use", ["open_r1.soft_overlong", "trl.soft_overlong"])
def test_soft_overlong(use):
    ids = tokens(0, 1, 79, 80, 81, 85, 90, 99, 100, 130)
    expected = [0.0, 0.0, 0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0]
    assert values(use, completion_ids=ids, max_completion_len=100, soft_punish_cache=20) == expected


def test_length():
    """From 0.5 for the shortest text of the call to -0.5 for the longest; at most 0 for wrong ones."""
    texts = [
        RIGHT[9],
        WRONG[10],
        RIGHT[10],
        WRONG[20],
        RIGHT[20],
        RIGHT[25],
        WRONG[30],
        RIGHT[50],
        WRONG[50],
        RIGHT[59],
    ]
    expected = [0.5, 0.0, 0.48, 0.0, 0.28, 0.18, 0.0, -0.32, -0.32, -0.5]
    assert values("open_r1.len", completions=texts, solution=["$1$"] * 10) == pytest.approx(expected, abs=1e-12)


def test_open_r1_cosine_counts_characters_and_rises_again():
    texts = [
        RIGHT[20],
        RIGHT[25],
        RIGHT[50],
        RIGHT[75],
        RIGHT[100],
        RIGHT[150],
        RIGHT[200],
        WRONG[25],
        WRONG[100],
        WRONG[200],
    ]
    expected = [
        0.9522542485937369, 0.9267766952966369, 0.75, 0.5732233047033631, 0.5, 0.75, 1.0,
        -0.9267766952966369, -0.5, -1.0,
    ]  # fmt: skip
    found = values("open_r1.cosine", completions=texts, completion_ids=[[]] * 10, solution=["$1$"] * 10, max_len=100)
    assert found == pytest.approx(expected, abs=1e-12)


def test_trl_cosine_counts_tokens_up_to_the_limit():
    texts = [RIGHT[9]] * 6 + [WRONG[10]] * 4
    expected = [
        1.0, 0.9267766952966369, 0.75, 0.5, 0.5, 0.5, -1.0, -0.9267766952966369, -0.5, -0.5,
    ]  # fmt: skip
    ids = tokens(0, 25, 50, 100, 150, 200, 0, 25, 100, 200)
    found = values("trl.cosine", completions=texts, completion_ids=ids, solution=["1"] * 10, max_len=100)
    assert found == pytest.approx(expected, abs=1e-12)


def test_repetition_of_words():
    texts = [
        "", "one", "one two", "one one one", "One one ONE", "a b a b", "a b c a b c", "a b c d", "x " * 11, "a, a a",
    ]  # fmt: skip
    expected = [0.0, 0.0, 0.0, -0.5, -0.5, -1 / 3, -0.4, 0.0, -0.9, 0.0]
    found = values("open_r1.repetition_penalty", completions=texts, ngram_size=2, max_penalty=-1.0)
    assert found == pytest.approx(expected, abs=1e-12)


def test_repetition_of_tokens():
    ids = [[], [1], [1, 2], [1, 1], [1, 1, 1], [1, 2, 1, 2], [1, 2, 3, 1, 2, 3], [7] * 11, [1, 2, 3, 4], [5, 5, 6, 6]]
    expected = [0.0, 0.0, 0.0, 0.0, -1.0, -2 / 3, -0.8, -1.8, 0.0, 0.0]
    found = values("trl.repetition_penalty", completion_ids=ids, ngram_size=2, max_penalty=-2.0)
    assert found == pytest.approx(expected, abs=1e-12)
