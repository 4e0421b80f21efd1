"""Rewards: what functions get, what they may return, and that nothing they do can hang or silently zero a run."""

import asyncio
import itertools
import math
import re
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas
import pytest
import sympy
import torch

from builtin_rewards import load_builtin
from cohort.errors import UserError
from cohort.rewards import RewardRunner
from commands import set_up
from reward_samples import MESSAGES, group, reward, score_texts
from tiny import write_jsonl


def fails(function, *, texts=("one", "two"), **settings):
    with pytest.raises(UserError) as caught:
        score_texts(function, texts, **settings)
    return str(caught.value)


# --- what a function gets ---------------------------------------------------------------------------------------


def test_one_call_gets_every_completion_of_the_step_in_order():
    calls = []

    def f(**kwargs):
        calls.append(kwargs)
        return [0.0, 1.0, 2.0]

    RewardRunner([reward(f)]).score([group("p", ["a", "b"], answer=1), group("q", ["c"], level=2)])
    assert [calls[0].pop(name) is not None for name in ("trainer_state", "log_metric", "log_extra")] == [True] * 3
    assert type(calls[0]["completions"]) is list
    assert calls == [
        {
            "prompts": ["p", "p", "q"],
            "completions": ["a", "b", "c"],
            "completion_ids": [[10, 20], [11, 21], [10, 20]],
            "answer": [1, 1, None],
            "level": [None, None, 2],
        }
    ]


def test_messages_in_messages_out():
    def f(prompts, completions):
        assert prompts == [MESSAGES, MESSAGES]
        assert completions == [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
        return [1.0, 0.0]

    scored = RewardRunner([reward(f)]).score([group(MESSAGES, ["4", "5"])])
    assert scored[0].rewards.tolist() == [1.0, 0.0]


def test_without_kwargs_only_what_is_named():
    def f(completions, answer, factor, missing=7):
        assert missing == 7
        return [factor * (c == a) for c, a in zip(completions, answer, strict=True)]

    scored = RewardRunner([reward(f, args={"factor": 3})]).score([group("p", ["a", "b"], answer="b", level=1)])
    assert scored[0].rewards.tolist() == [0.0, 3.0]


def test_the_prompt_column_is_passed_by_its_own_name():
    """As rewards of TRL and reasoning-gym expect it, beside `prompts`."""
    seen = {}

    def f(prompts, completions, question, **columns):
        seen.update(prompts=prompts, question=question, columns=columns)
        return [1.0] * len(completions)

    runner = RewardRunner([reward(f)], columns=["answer", "question"], prompt_column="question")
    runner.score([group("p", ["a", "b"], answer=1), group(MESSAGES, ["c"], answer=2)])
    assert seen["question"] == seen["prompts"] == ["p", "p", MESSAGES]
    assert seen["columns"]["answer"] == [1, 1, 2]


def test_a_dataset_column_that_no_row_of_the_step_has_is_all_none():
    def f(completions, hint):
        assert hint == [None]
        return [1.0]

    RewardRunner([reward(f)], columns=["hint"]).score([group("p", ["a"])])


def test_a_function_that_changes_its_lists_changes_nothing_for_the_next():
    def greedy(prompts, completions, answer):
        n = len(completions)
        prompts[0].clear()
        completions[0][0]["content"] = "changed"
        answer.clear()
        return [0.0] * n

    def f(prompts, completions, answer):
        assert (prompts[0], completions[0][0]["content"], answer) == (MESSAGES, "a", ["x"])
        return [1.0]

    g = group(MESSAGES, ["a"], answer="x")
    assert RewardRunner([reward(greedy, name="greedy"), reward(f)]).score([g])[0].rewards.tolist() == [1.0]


def test_a_column_named_like_an_argument_of_a_builtin_is_not_that_argument():
    runner = RewardRunner([reward(load_builtin("exact"))])
    assert runner.score([group("p", ["4"], answer=4, pattern="a column")])[0].rewards.tolist() == [1.0]


# --- what it may return -----------------------------------------------------------------------------------------


def test_weighted_sum_over_the_parts_that_scored():
    runner = RewardRunner(
        [
            reward(lambda completions: [1.0, 1.0, None, None], name="a", weight=0.5),
            reward(lambda completions: [2.0, None, 3.0, None], name="b", weight=-2.0),
        ]
    )
    scored = runner.score([group("p", ["1", "2"]), group("q", ["3", "4"])])
    np.testing.assert_array_equal([s.rewards for s in scored], [[-3.5, 0.5], [-6.0, np.nan]])
    np.testing.assert_array_equal(scored[1].reward_parts["a"], [np.nan, np.nan])
    np.testing.assert_array_equal(scored[1].reward_parts["b"], [3.0, np.nan])


@pytest.mark.parametrize(
    "returned",
    [
        [True, 2, 0.5],
        (True, 2, 0.5),
        np.array([1.0, 2.0, 0.5], dtype=np.float32),
        [np.bool_(True), np.int64(2), np.array(0.5)],
        [True, Fraction(2), Decimal("0.5")],
        {"a": 1, "b": 2.0, "c": 0.5}.values(),
        np.array([[1.0], [2.0], [0.5]]),
        torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.bfloat16),
        [torch.tensor([1.0]), torch.tensor(2), sympy.Integer(1) / 2],
        pandas.Series([1, 2, 0.5], index=[5, 6, 7]),
    ],
)
def test_numbers_of_every_kind(returned):
    assert score_texts(lambda completions: returned, ["a", "b", "c"]) == [1.0, 2.0, 0.5]


def test_generators_and_maps_are_lists_and_raise_within_the_function():
    assert score_texts(lambda completions: (len(c) for c in completions), ["a", "bcd"]) == [1.0, 3.0]
    assert score_texts(lambda completions: map(len, completions), ["a", "bcd"]) == [1.0, 3.0]

    def f(completions):
        for completion in completions:
            yield {}[completion]

    line = f.__code__.co_firstlineno + 2
    assert f"raised KeyError: 'one' (at {__file__}:{line}, reading completion 1 of 2, 'one')" in fails(f)


def test_nan_is_not_scored_counted_and_told_once():
    runner, told = RewardRunner([reward(lambda completions: [1.0, math.nan, np.float32("nan")], name="mine")]), []
    runner.notify = told.append
    for _ in range(2):
        (scored,) = runner.score([group("p", ["a", "b", "c"])], during="step 3")
        np.testing.assert_array_equal(scored.rewards, [1.0, math.nan, math.nan])
        assert runner.counts() == {"mine/nan": 2}
    assert told == ["reward 'mine' returned NaN for 2 of 3 completions, which counts as not scored, like None (step 3)"]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], ["returned 1 values for 2 completions", "position 1", "'two'"]),
        ([1.0, 2.0, 3.0], ["returned 3 values for 2 completions", "position 2", "3.0"]),
        (1.0, ["returned 1.0 (float)", "a list"]),
        (np.array(1.0), ["(ndarray)", "a list"]),
        (None, ["returned None (NoneType)", "a list"]),
        ("ab", ["'ab' (str)", "a list"]),
        ({"a": 1, "b": 2}, ["(dict)", "a list"]),
        ({1.0, 2.0}, ["(set)", "a list"]),
        (itertools.count(), ["returned 3 values for 2 completions"]),
        ([float("-inf"), 1.0], ["-inf (float) at position 0", "'one'"]),
        ([1.0, "0.5"], ["'0.5' (str) at position 1", "'two'"]),
        ([1.0, [2.0]], ["[2.0] (list) at position 1", "'two'"]),
        ([1.0, np.array([1.0, 2.0])], ["(ndarray) at position 1"]),
        ([1.0, 1j], ["1j (complex) at position 1"]),
        ([1.0, 10**400], ["(int) at position 1"]),
    ],
)
def test_everything_else_is_an_error_with_the_place(returned, words):
    message = fails(lambda completions: returned, name="mine")
    for word in ["reward 'mine'", *words]:
        assert word in message


def test_nobody_scored_anything():
    runner = RewardRunner([reward(lambda completions: [None], name="a"), reward(lambda completions: [None], name="b")])
    with pytest.raises(UserError, match="no reward scored any of the 1 completions of this step: 'a', 'b'"):
        runner.score([group("p", ["x"])])


def test_numbers_whose_squares_overflow_are_an_error():
    assert "exceeds 1e+30" in fails(lambda completions: [1e20, 1.0], weight=1e20)
    assert "reward 'r' returned 1e+308" in fails(lambda completions: [1e308, 1.0])


def test_no_groups_no_calls_and_no_rewards_no_runner():
    assert RewardRunner([reward(lambda: 1 / 0)]).score([]) == []
    with pytest.raises(UserError, match="at least one reward"):
        RewardRunner([])


def test_names_become_unique():
    runner = RewardRunner([reward(lambda completions: [1.0], name=n) for n in ("a", "a", "a_2", "b", "a")])
    assert [f.name for f in runner.functions] == ["a", "a_2", "a_2_2", "b", "a_3"]


# --- raising and hanging ----------------------------------------------------------------------------------------


def test_an_exception_names_reward_type_text_and_line():
    def f(completions):
        return [{}["key"] for _ in completions]

    with pytest.raises(UserError, match="reward 'f' raised KeyError: 'key'") as caught:
        score_texts(f, ["a"], name="f")
    line = f.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_line_is_the_users_even_when_a_library_raises():
    def f(completions):
        return textwrap.dedent(5)

    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in fails(f)


@pytest.mark.parametrize(
    ("function", "content", "advice"),
    [
        (lambda completions: [c[0]["content"] for c in completions], "p", "completions are text too: use `completion`"),
        (lambda completions: [c.strip() for c in completions], MESSAGES, "its text is `completion[0]['content']`"),
        (lambda completions: [re.search("a", c) for c in completions], MESSAGES, "`completion[0]['content']`"),
        (lambda completions: ["<think>" + c for c in completions], MESSAGES, "`completion[0]['content']`"),
        (lambda completions: [{}[c] for c in completions], "p", None),
        (lambda completions: [c[5] for c in completions], MESSAGES, None),
    ],
)
def test_a_function_for_the_other_form_of_prompts_is_told_of_it(function, content, advice):
    with pytest.raises(UserError) as caught:
        RewardRunner([reward(function)]).score([group(content, ["one", "two"])])
    assert ("; the prompts are " in str(caught.value)) == (advice is not None)
    assert advice is None or advice in str(caught.value)


RAISES = """
def score(completions, answer, **kwargs):
    return [grade(c, a) for c, a in zip(completions, answer)]

def grade(completion, answer):
    if answer == "1":
        raise ArithmeticError("no grade")
    return 1.0
"""


def test_a_run_names_the_completion_and_keeps_the_traceback(tmp_path, cohort):
    write_jsonl(tmp_path / "data.jsonl", [{"question": "1?", "answer": "1"}] * 2)
    rewards = [{"use": f"{tmp_path}/raises.py:score", "name": "my.reward"}]
    ended = cohort("train", set_up(tmp_path, files={"raises.py": RAISES}, rewards=rewards))
    raised = f"reward 'my.reward' raised ArithmeticError: no grade (at {tmp_path}/raises.py:7, reading "
    assert re.search(re.escape(raised) + r"completion 1 of 4, '.+'\)", ended.err), ended.err
    saved = (tmp_path / "run" / "logs" / "reward-my_reward.txt").read_text()
    assert saved.startswith("Traceback") and saved.endswith("ArithmeticError: no grade\n")
    assert ", in score\n" in saved and ", in grade\n" in saved


def test_system_exit_is_an_error_too():
    assert "raised SystemExit: 3" in fails(lambda completions: sys.exit(3))


def test_a_hung_function_is_an_error_with_its_deadline_and_line():
    def f(completions):
        threading.Event().wait(3600)

    message = fails(f, name="slow", timeout_s=0.1)
    for word in ["reward 'slow'", "deadline of 0.1 s", f"{__file__}:{f.__code__.co_firstlineno + 1}"]:
        assert word in message


def test_a_function_that_keeps_the_interpreter_lock_ends_the_process(tmp_path):
    """No thread can watch an extension that keeps it; the timer outside of the interpreter can."""
    program = """
        import ctypes
        from cohort.rewards import RewardFunction, call
        call._INTERPRETER_GRACE_S = 0.3
        def stuck(completions):
            return ctypes.PyDLL(None).sleep(600)
        call.call_sync(RewardFunction(name="stuck", function=stuck, timeout_s=0.2), {"completions": []})
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in reward 'stuck'" in done.stderr


# --- async ------------------------------------------------------------------------------------------------------


def test_async_functions_run_together_in_one_loop_that_stays():
    loops, meeting = [], {}

    async def meet(completions, me, other):
        loops.append(asyncio.get_running_loop())
        meeting.setdefault(me, asyncio.Event()).set()
        await asyncio.wait_for(meeting.setdefault(other, asyncio.Event()).wait(), 5)
        return [1.0 for _ in completions]

    class Callable:
        async def __call__(self, completions):
            return [1.0 for _ in completions]

    runner = RewardRunner(
        [
            reward(meet, name="a", args={"me": 1, "other": 2}),
            reward(lambda completions: [1.0, 1.0], name="sync"),
            reward(meet, name="b", args={"me": 2, "other": 1}),
            reward(Callable(), name="c"),
        ]
    )
    for _ in range(2):
        assert runner.score([group("p", ["x", "y"])])[0].rewards.tolist() == [4.0, 4.0]
    assert len(loops) == 4 and len(set(loops)) == 1


def test_async_errors_and_deadlines():
    async def raises(completions):
        raise TimeoutError("from the service")

    async def hangs(completions):
        await asyncio.sleep(30)

    async def stubborn(completions):
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                continue

    async def blocks(completions):
        time.sleep(5)

    assert "raised TimeoutError: from the service" in fails(raises)
    message = fails(hangs, timeout_s=0.1)
    assert "deadline of 0.1 s" in message and f"{__file__}:{hangs.__code__.co_firstlineno + 1}" in message
    assert "deadline of 0.1 s" in fails(stubborn, timeout_s=0.1)
    message = fails(blocks, timeout_s=0.1)
    assert "event loop is blocked" in message and f"{__file__}:{blocks.__code__.co_firstlineno + 1}" in message
