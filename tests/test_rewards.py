"""Rewards: what functions get, what they may return, and that nothing they do can hang or silently zero a run."""

import asyncio
import dataclasses
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.records import Completion, Prompt, RolloutGroup
from cohort.rewards import (
    RewardFunction,
    RewardRunner,
    build_rewards,
    check_columns,
    load_reward,
)
from cohort.rewards.exact import ExactReward
from cohort.rewards.format import FormatReward
from cohort.rewards.math import MathReward, gold_text, plain_verdict
from cohort.rewards.math_client import MathWorker
from cohort.rewards.math_worker import judge, latex_of_gold
from cohort.rewards.overlong import OverlongReward

pytestmark = pytest.mark.timeout(60)


def group(content, texts, *, prompt_id=0, **columns):
    prompt = Prompt(id=prompt_id, epoch=0, content=content, token_ids=np.array([1, 2]), columns=columns)
    completions = tuple(
        Completion(
            token_ids=np.array([10 + i, 20 + i]),
            sampling_logprobs=np.zeros(2),
            finish_reason="stop",
            policy_version=0,
            text=text,
        )
        for i, text in enumerate(texts)
    )
    return RolloutGroup(prompt=prompt, completions=completions)


def reward(function, *, name="r", **settings):
    return RewardFunction(name=name, function=function, **settings)


def score_texts(function, texts, **settings):
    """Rewards of one group by one function, as a list."""
    return RewardRunner([reward(function, **settings)]).score([group("q", texts)])[0].rewards.tolist()


def fails(function, *, texts=("one", "two"), **settings):
    with pytest.raises(UserError) as caught:
        score_texts(function, texts, **settings)
    return str(caught.value)


MESSAGES = [{"role": "user", "content": "2+2?"}]


# --- what a function gets ---------------------------------------------------------------------------------------


def test_one_call_gets_every_completion_of_the_step_in_order():
    calls = []

    def f(**kwargs):
        calls.append(kwargs)
        return [0.0] * 3

    RewardRunner([reward(f)]).score([group("p", ["a", "b"], answer=1), group("q", ["c"], level=2)])
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
    runner = RewardRunner([reward(ExactReward())])
    assert runner.score([group("p", ["4"], answer=4, pattern="a column")])[0].rewards.tolist() == [1.0]


# --- what it may return -----------------------------------------------------------------------------------------


def test_weighted_sum_over_the_parts_that_judged():
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
    ],
)
def test_numbers_of_every_kind(returned):
    assert score_texts(lambda completions: returned, ["a", "b", "c"]) == [1.0, 2.0, 0.5]


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
        ([1.0, float("nan")], ["nan (float) at position 1", "'two'"]),
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


def test_nobody_judged_anything():
    runner = RewardRunner([reward(lambda completions: [None], name="a"), reward(lambda completions: [None], name="b")])
    with pytest.raises(UserError, match="no reward judged any of the 1 completions of this step: 'a', 'b'"):
        runner.score([group("p", ["x"])])


def test_a_sum_beyond_float64_is_an_error():
    assert "too large" in fails(lambda completions: [1e308, 1.0], weight=1e10)


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


def test_system_exit_is_an_error_too():
    assert "raised SystemExit: 3" in fails(lambda completions: sys.exit(3))


def test_a_hung_function_is_an_error_with_its_deadline_and_line():
    def f(completions):
        threading.Event().wait(30)

    start = time.monotonic()
    message = fails(f, name="slow", timeout_s=0.1)
    assert time.monotonic() - start < 5
    for word in ["reward 'slow'", "deadline of 0.1 s", f"{__file__}:{f.__code__.co_firstlineno + 1}"]:
        assert word in message


def test_a_function_that_keeps_the_interpreter_lock_ends_the_process(tmp_path):
    """No thread can watch a regular expression that backtracks for ever; the timer outside of the interpreter can."""
    program = """
        import re
        from cohort.rewards import RewardFunction, call
        call._INTERPRETER_GRACE_S = 0.3
        def stuck(completions):
            return re.match("(a+)+$", "a" * 60 + "b")
        call.call_sync(RewardFunction(name="stuck", function=stuck, timeout_s=0.2), {"completions": []}, None)
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in stuck" in done.stderr


def test_on_thread_start_runs_in_the_thread_of_the_function():
    local = threading.local()

    def f(completions):
        return [local.device for _ in completions]

    async def g(completions):
        return [local.device for _ in completions]

    def start():
        local.device = 3

    runner = RewardRunner([reward(f, name="f"), reward(g, name="g")], on_thread_start=start)
    assert runner.score([group("p", ["a"])])[0].rewards.tolist() == [6.0]


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


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A configuration's folder with reward files; the working directory is another."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    config_dir = tmp_path / "config"
    config_dir.mkdir()
    (config_dir / "helper_beside.py").write_text("VALUE = 2.0\n")
    (config_dir / "my_rewards.py").write_text(
        textwrap.dedent(
            """
            import functools
            LOADED = []
            LOADED.append(1)
            def brevity(completions, **kwargs):
                from helper_beside import VALUE
                return [VALUE for _ in completions]
            def level(prompts, completions, difficulty, scale=1.0):
                return [scale for _ in completions]
            scaled = functools.partial(level, scale=2.0)
            class Judge:
                def __call__(self, completions):
                    return [float(len(LOADED)) for _ in completions]
            judge = Judge()
            constant = 5
            def by_position(completions, /):
                return []
            """
        )
    )
    return config_dir


def load_error(use, folder):
    with pytest.raises(UserError) as caught:
        load_reward(use, base_dir=folder, field="rewards[3].use")
    assert str(caught.value).startswith("rewards[3].use: ")
    return str(caught.value)


def test_builtins_files_and_modules_load(folder):
    assert [type(load_reward(n, base_dir=folder)) for n in ("math", "exact", "format")] == [
        MathReward,
        ExactReward,
        FormatReward,
    ]
    assert load_reward("my_rewards.py:brevity", base_dir=folder)(["a"]) == [2.0]
    assert load_reward(f"{folder}/my_rewards.py:judge", base_dir=Path("elsewhere"))(["a"]) == [1.0]  # loaded once
    assert load_reward("os.path:join", base_dir=folder) is os.path.join
    Path("in_cwd.py").write_text("def f(completions):\n    return [4.0]\n")
    assert load_reward("in_cwd.py:f", base_dir=folder)([]) == [4.0]
    assert load_reward("in_cwd:f", base_dir=folder)([]) == [4.0]


def test_loading_errors_say_what_works(folder):
    (folder / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    (folder / "unparsable.py").write_text("def f(:\n")
    (folder / "no_such_import.py").write_text("import no_such_package\n")
    for use, words in {
        "maths": ["'maths'", "Did you mean 'math'?", "exact, format, math, overlong", "path/to/file.py:function"],
        "my_rewards.py": ["'my_rewards.py:function'"],
        "my_reward.py:brevity": ["no such file", str(folder), "cwd", "Did you mean 'my_rewards.py'?"],
        "my_rewards.py:brevety": ["has no 'brevety'", "Did you mean 'brevity'?", "level"],
        "my_rewards.py:constant": ["not callable", "5 (int)"],
        "my_rewards.py:Judge": ["is a class", "Judge()"],
        "broken.py:f": ["ZeroDivisionError: division by zero", f"{folder}/broken.py:2"],
        "unparsable.py:f": ["SyntaxError", f"{folder}/unparsable.py:1"],
        "no_such_import.py:f": ["No module named 'no_such_package'", f"{folder}/no_such_import.py:1"],
        "no_such_module.sub:f": ["no module 'no_such_module'", "cwd"],
        "os.pth:f": ["no module 'os.pth'"],
        "os.path:joim": ["Did you mean 'join'?"],
    }.items():
        message = load_error(use, folder)
        for word in [repr(use), *words]:
            assert word in message, (use, message)


def test_build_rewards_names_weights_and_defaults(folder):
    configs = [
        RewardConfig(use="math"),
        RewardConfig(use="my_rewards.py:level", weight=-0.5, args={"scale": 3.0}, timeout_s=5),
        RewardConfig(use="my_rewards.py:scaled", name="twice"),
        RewardConfig(use="my_rewards.py:judge"),
    ]
    built = build_rewards(configs, base_dir=folder, columns=["answer", "difficulty"], max_completion_tokens=8)
    assert [(r.name, r.weight, dict(r.args), r.timeout_s) for r in built] == [
        ("math", 1.0, {}, 300.0),
        ("level", -0.5, {"scale": 3.0}, 5.0),
        ("twice", 1.0, {}, 300.0),
        ("Judge", 1.0, {}, 300.0),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use": "math"}, ["'math'", "the column 'answer'", "Columns: answers, difficulty", "Did you mean 'answers'?"]),
        ({"use": "math", "args": {"answer_columm": "answers"}}, ["'answer_columm'", "Did you mean 'answer_column'?"]),
        ({"use": "math", "args": {"answer_column": "answers", "deadline_s": 0}}, ["deadline_s", "above 0, got 0"]),
        ({"use": "exact", "args": {"answer_column": "answers", "pattern": "(a"}}, ["'(a'", "not a regular expression"]),
        ({"use": "exact", "args": {"answer_column": "answers", "pattern": "a"}}, ["exactly 1 group", "it has 0"]),
        ({"use": "format", "args": {"pattern": 5}}, ["pattern must be a string", "5"]),
        ({"use": "format", "args": {"pattern": "["}}, ["'['", "not a regular expression"]),
        ({"use": "overlong"}, ["rewards[0].args: reward 'overlong'", "'buffer_tokens'"]),
        (
            {"use": "overlong", "args": {"buffer_tokens": 9}},
            ["buffer_tokens: 9 must be a whole number from 1 to rollout.max_completion_tokens: 8"],
        ),
        ({"use": "overlong", "args": {"buffer_tokens": 4, "penalty": -1}}, ["penalty: -1 must be a number above 0"]),
        ({"use": "my_rewards.py:level", "args": {"scael": 1}}, ["no argument 'scael'", "Did you mean 'scale'?"]),
        ({"use": "my_rewards.py:level", "args": {"prompts": 1}}, ["'prompts' is always passed"]),
        ({"use": "my_rewards.py:brevity", "args": {"answers": 1}}, ["'answers' is a column of the dataset too"]),
        ({"use": "my_rewards.py:by_position"}, ["'completions' by position only"]),
    ],
)
def test_settings_that_cannot_work_fail_before_the_run(folder, settings, words):
    with pytest.raises(UserError) as caught:
        build_rewards(
            [RewardConfig(**settings)], base_dir=folder, columns=["answers", "difficulty"], max_completion_tokens=8
        )
    for word in ["rewards[0]", *words]:
        assert word in str(caught.value)


def test_check_columns_names_reward_parameter_and_columns():
    def f(completions, answer, extra=None):
        return []

    check_columns(f, name="f", args={}, columns=["answer"])
    check_columns(f, name="f", args={"answer": 1}, columns=[])
    with pytest.raises(UserError) as caught:
        check_columns(f, name="f", args={}, columns=["solution", "answers"], field="rewards[1]")
    for word in ["rewards[1]", "reward 'f'", "parameter 'answer'", "Columns: answers, solution", "completion_ids"]:
        assert word in str(caught.value)


def test_importing_rewards_imports_no_heavy_library():
    program = "import sys, cohort.rewards; print([m for m in ('torch', 'transformers', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- exact and format -------------------------------------------------------------------------------------------


def test_exact():
    f = ExactReward()
    assert f([" 42\n", "43", "42"], answer=[42, "42", None]) == [1.0, 0.0, None]
    texts = ["Answer: 1 then Answer: 2 ", [{"role": "assistant", "content": "Answer: 1"}], "none"]
    assert f(texts, pattern=r"Answer: (\d)", solution=["2", "2", "2"], answer_column="solution") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n42", 1.0),
        ("  <think></think>42\n", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think>  \n ", 0.0),
        ("42", 0.0),
        ("well <think>a</think> 42", 0.0),
        ("<think>a</think> 4 <think>b</think> 42", 0.0),
        ("<think>a<think>b</think> 42", 0.0),
        ("<think>a</think> 42 </think>", 0.0),
        ("<think>a 42", 0.0),
    ],
)
def test_format_wants_one_think_block_and_an_answer(text, expected):
    assert FormatReward()([text, [{"role": "assistant", "content": text}]]) == [expected, expected]


def test_format_pattern_and_linear_time():
    assert FormatReward()(["a\nb", "ab"], pattern="a.b") == [1.0, 0.0]
    start = time.monotonic()
    FormatReward()(["<think>" + " " * 200_000 + "</think>" + " <" * 100_000 + "<think>"])
    assert time.monotonic() - start < 2


# --- math -------------------------------------------------------------------------------------------------------


@pytest.fixture
def math_reward():
    f = MathReward()
    yield f
    f.close()


CASES = [
    ("42", "The answer is 42.", "correct"),
    ("42", r"so \boxed{42}", "correct"),
    ("42", r"so $\boxed{41}$, not 42", "wrong"),
    ("42", "I do not know", "answer_unparsable"),
    ("1/2", r"$\frac{1}{2}$", "correct"),
    (r"\frac{1}{3}", r"\boxed{\frac{2}{6}}", "correct"),
    (r"$\frac{1}{3}$", r"\boxed{0.5}", "wrong"),
    ("1,000", r"\boxed{1000}", "correct"),
    ("1e3", "1000", "correct"),
    ("(1, 2)", "2", "wrong"),
    ("(1, 2)", r"\boxed{(1,2)}", "correct"),
    ("x^2 + 1", "$1 + x^2$", "correct"),
    ("2", r"<think>\boxed{1}</think> \boxed{2}", "correct"),
    ("The answer is 7.", r"\boxed{7}", "correct"),
    ("who knows", r"\boxed{7}", "gold_unparsable"),
]


@pytest.mark.parametrize(("gold", "text", "verdict"), CASES)
def test_math_verdicts(gold, text, verdict):
    assert judge(gold, text) == verdict


def test_gold_forms():
    assert [gold_text(a) for a in ("#1 .. 2+2=4\n#### 4 ", 4, 4.5, None)] == ["4", "4", "4.5", ""]
    assert [latex_of_gold(g) for g in (r"\frac12", "$5$", "3 apples", r"4 \text{ metres}")] == [
        r"$\frac12$",
        "$5$",
        "3 apples",
        r"$4 \text{ metres}$",
    ]
    with pytest.raises(UserError, match=r"column 'solution' holds \[1\] \(list\)"):
        gold_text([1], "solution")


@pytest.mark.parametrize("gold", ["0", "42", "-7", "100000"])
@pytest.mark.parametrize("answer", ["0", "42", "-7", "999999999999", "-0", "007", "4.2", "x"])
@pytest.mark.parametrize("form", ["%s", " %s\n", r"\boxed{%s}", "Line\n5 is (not) it, 1/2: \\boxed{ %s }.\n"])
def test_the_fast_path_gives_the_workers_verdict(gold, answer, form):
    fast = plain_verdict(gold, form % answer)
    assert fast == (judge(gold, form % answer) if answer in ("0", "42", "-7", "999999999999") else None)


@pytest.mark.parametrize(
    "text",
    ["", "42.0", "about 42", r"\boxed{42}%", r"$5 \boxed{42}", r"\boxed{1} \boxed{42}", r"final answer \boxed{42}"],
)
def test_the_fast_path_leaves_the_rest_to_the_worker(text):
    assert plain_verdict("42", text) is None


def test_math_in_the_runner(math_reward):
    runner = RewardRunner([reward(math_reward, name="math")])
    scored = runner.score(
        [
            group(MESSAGES, [r"\boxed{\frac{1}{2}}", "0.25", "?"], answer="so\n#### 0.5"),
            group("q", ["7"], prompt_id=1, answer="who knows"),
        ]
    )
    np.testing.assert_array_equal(np.concatenate([s.rewards for s in scored]), [1.0, 0.0, 0.0, np.nan])
    assert runner.counts() == {"math/answer_unparsable": 1, "math/gold_unparsable": 1}


def test_plain_answers_need_no_worker():
    f = MathReward(worker=MathWorker(["/does/not/exist"]))
    assert f([r"\boxed{5}", "6", "6"], answer=[5, "5", None]) == [1.0, 0.0, None]
    assert f.last_counts == {"gold_unparsable": 1}


def test_a_killed_worker_is_replaced_and_nothing_is_lost(math_reward):
    assert math_reward(["0.5", "\ud800 \x00\n 0.5"], answer=["1/2", "1/2"]) == [1.0, 1.0]
    first = math_reward._worker.pid
    os.kill(first, signal.SIGKILL)
    assert math_reward(["0.5"], answer=["1/2"]) == [1.0]
    assert math_reward._worker.pid != first
    assert math_reward.last_counts == {}


FAKE_WORKER = """
import json, os, sys, time
print('{"id": null}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["text"] == "hang":
        time.sleep(60)
    if request["text"] == "die":
        os._exit(7)
    if request["text"] == "die once" and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), 9)
    if request["text"] == "babble":
        print("not json", flush=True)
    print(json.dumps({"id": request["id"], "verdict": "correct"}), flush=True)
"""


@pytest.fixture
def fake_reward(tmp_path):
    f = MathReward(worker=MathWorker([sys.executable, "-c", FAKE_WORKER, str(tmp_path / "died")]))
    yield f
    f.close()


def test_a_hung_answer_is_not_judged_and_counted_and_the_next_is_judged(fake_reward):
    start = time.monotonic()
    rewards = fake_reward(["a", "hang", "hang", "b"], answer=["g"] * 4, deadline_s=0.5)
    assert rewards == [1.0, None, None, 1.0]  # the same answer twice waits once
    assert fake_reward.last_counts == {"timeout": 2}
    assert time.monotonic() - start < 5


def test_a_worker_that_dies_of_an_answer(fake_reward):
    assert fake_reward(["die once", "die", "babble", "b"], answer=["g"] * 4) == [1.0, None, None, 1.0]
    assert fake_reward.last_counts == {"crashed": 2}


def test_a_worker_killed_while_it_works(fake_reward):
    fake_reward(["a"], answer=["g"])
    killer = threading.Timer(0.2, lambda pid: os.kill(pid, signal.SIGKILL), [fake_reward._worker.pid])
    killer.start()
    # Judged again by a second worker, which hangs on it too, until the deadline.
    assert fake_reward(["hang"], answer=["g"], deadline_s=0.6) == [None]
    assert fake_reward.last_counts == {"timeout": 1}


def test_the_budget_ends_a_call_of_many_slow_answers(tmp_path):
    f = MathReward(worker=MathWorker([sys.executable, "-c", FAKE_WORKER, ""]), budget_s=0.4)
    assert f(["hang", "b", "c"], answer=["g"] * 3) == [None, None, None]
    assert f.last_counts == {"timeout": 1, "out_of_time": 2}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no math-verify here')"], ["ended at once", "no math-verify"]),
        ([sys.executable, "-c", "import time; time.sleep(60)"], ["not ready within 0.3 s"]),
    ],
)
def test_a_worker_that_does_not_start_is_an_error(command, words):
    f = MathReward(worker=MathWorker(command, start_timeout_s=0.3 if "ready" in words[0] else 20))
    with pytest.raises(UserError) as caught:
        RewardRunner([reward(f, name="math")]).score([group("p", ["x = 1"], answer="1")])
    for word in ["reward 'math'", "does not start", *words]:
        assert word in str(caught.value)


def gone(pid):
    """Waits up to 10 s for a process that is not a child of this one to end."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended; nobody waits for it
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "pass"])
def test_the_worker_does_not_outlive_its_parent(end):
    program = f"""
        import os
        from cohort.rewards.math_client import MathWorker
        worker = MathWorker()
        print(worker.judge("1/2", "0.5", deadline_s=20), worker.pid, flush=True)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    verdict, pid = done.stdout.split()
    assert verdict == "correct" and gone(int(pid))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_worker_busy_when_its_parent_is_killed_ends_after_its_deadline():
    program = """
        import os, threading, time
        from cohort.rewards.math_client import MathWorker
        worker = MathWorker()
        worker.judge("1/2", "0.5", deadline_s=20)
        print(worker.pid, flush=True)
        threading.Timer(0.3, os.kill, [os.getpid(), 9]).start()
        worker.judge("1", "$9^{9^{9^{9}}}$", deadline_s=0.6)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))


def test_overlong_is_the_soft_punishment_of_dapo():
    """Limit 16, buffer 4: free up to 12 tokens, then a quarter of the penalty for each."""
    reward = OverlongReward(16)
    ids = [[0] * n for n in (1, 12, 13, 15, 16)]
    assert reward(completion_ids=ids, buffer_tokens=4) == [0.0, 0.0, -0.25, -0.75, -1.0]
    assert reward(completion_ids=ids, buffer_tokens=4, penalty=2.0)[2:] == [-0.5, -1.5, -2.0]
    assert reward(completion_ids=[[0] * 8], buffer_tokens=16) == [-0.5]


def test_a_reward_that_only_shapes_judges_nothing(folder):
    """The middle completion is as long as the limit, and nobody judged it; the last was judged, and is as long."""
    overlong = reward(OverlongReward(2), name="overlong", args={"buffer_tokens": 1}, shapes=True)
    judge = reward(lambda completions: [1.0, None, 1.0], name="judge")
    g = group("q", ["a", "b", "c"])
    lengths = (1, 2, 2)
    completions = tuple(
        dataclasses.replace(c, token_ids=np.zeros(n, dtype=np.int64))
        for c, n in zip(g.completions, lengths, strict=True)
    )
    (scored,) = RewardRunner([judge, overlong]).score([dataclasses.replace(g, completions=completions)])
    assert np.array_equal(scored.rewards, [1.0, math.nan, 0.0], equal_nan=True)
    assert scored.reward_parts["overlong"].tolist() == [0.0, -1.0, -1.0]
    with pytest.raises(UserError, match=r"no reward judged any of the 3 completions of this step: 'silent' returned"):
        RewardRunner([reward(lambda completions: [None] * 3, name="silent"), overlong]).score([g])
    alone = [RewardConfig(use="overlong", args={"buffer_tokens": 1})]
    with pytest.raises(UserError, match=r"rewards: 'overlong' only adds to what other rewards judge"):
        build_rewards(alone, base_dir=folder, columns=[], max_completion_tokens=2)
    both = [*alone, RewardConfig(use="exact")]
    built = build_rewards(both, base_dir=folder, columns=["answer"], max_completion_tokens=2)
    assert [f.shapes for f in built] == [True, False]
