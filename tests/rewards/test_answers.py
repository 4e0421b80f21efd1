"""The expected answer of a row: what its rewards compare with."""

from typing import Any

import pytest

from builtin_rewards import load_builtin
from cohort.rewards import RewardRunner
from cohort.rewards.answers import MAX_CHARACTERS, expected_answer
from reward_samples import group, reward


def by_length(completions, solution, **columns):
    return [float(len(text) == len(gold)) for text, gold in zip(completions, solution, strict=True)]


def constant(completions):
    return [1.0 for _ in completions]


def scored_answer(rewards, **columns):
    """The answer recorded with a group's rewards."""
    return RewardRunner(rewards).score([group("q", ["a", "b"], **columns)], require_scores=False)[0].answer


@pytest.mark.parametrize(
    ("use", "args", "columns", "answer"),
    [
        ("exact", {}, {"answer": "B", "solution": "long"}, "B"),
        ("exact", {"answer_column": "gold"}, {"answer": "no", "gold": "yes"}, "yes"),
        ("exact", {"answer_column": "gold"}, {"answer": "not compared with", "gold": None}, None),
        ("math", {}, {"answer": 0.5}, "0.5"),
        ("exact_set", {}, {"answer": ["ü", "b"]}, '["ü", "b"]'),
        ("trl.accuracy", {}, {"answer": "no", "solution": "$x$"}, "$x$"),
        ("regex", {"pattern": "x"}, {"label": "a", "target": "b"}, None),
        ("regex", {"pattern": "x"}, {"reward_model": {"style": "rule", "ground_truth": "7"}}, "7"),
        ("regex", {"pattern": "x"}, {"reward_model": "a name", "question": "?"}, None),
        ("regex", {"pattern": "x"}, {"expected": {"a": [1, None]}}, '{"a": [1, null]}'),
        ("code", {"tests_column": "solution"}, {"solution": ["assert f() == 1"]}, None),
        ("code", {}, {"tests": ["assert f() == 1"], "solution": "def f(): return 1"}, "def f(): return 1"),
    ],
)
def test_the_column_that_a_reward_compares_with(use, args, columns, answer):
    assert expected_answer(columns, [load_builtin(use, args)]) == answer


def by_label(completions, label):
    return [float(text == gold) for text, gold in zip(completions, label, strict=True)]


def test_a_column_that_a_function_takes_is_the_only_one():
    columns = {"answer": "#### 42", "solution": "42", "label": "b"}
    assert scored_answer([reward(by_label)], **columns) == "b"
    assert scored_answer([reward(by_label)], answer="not compared with", label=None) is None
    assert scored_answer([reward(by_length)], **columns) == "42"
    assert scored_answer([reward(constant)], **columns) == "#### 42"


def test_rewards_of_other_rows_do_not_count():
    exact = reward(load_builtin("exact"), where={"source": "text"})
    choice = reward(load_builtin("choice", {"answer_column": "letter"}), name="c", where={"source": "quiz"})
    columns = {"answer": "no", "letter": "B"}
    assert [scored_answer([exact, choice], source=s, **columns) for s in ("text", "quiz", "other")] == ["no", "B", "no"]


def test_an_answer_of_any_kind_is_text_of_bounded_length():
    (regex,) = functions = [load_builtin("regex", {"pattern": "x"})]
    long = expected_answer({"answer": "7" * 10_000}, functions)
    assert (len(long), long[-4:]) == (MAX_CHARACTERS, "7...")
    assert expected_answer({"answer": "\ud83d half"}, functions) == "? half"
    assert expected_answer({"answer": {(1, 2): 3}}, functions) == "{(1, 2): 3}"
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    assert "RecursionError" in expected_answer({"answer": nested}, functions)
    assert expected_answer({"answer": [{1.5, regex}]}, functions).startswith('["{')
