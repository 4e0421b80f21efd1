"""Rewards from names, files and modules: what loads, what is refused; and the built-in ones without a worker."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from builtin_rewards import Builtin, configured, load_builtin
from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards import RewardRunner, build_rewards, check_columns, load_reward
from cohort.rewards.function import keyword_parameters, name_of
from cohort.rewards.math import MathReward
from cohort.rewards.text import ExactReward, FormatReward
from reward_samples import group, reward
from samples import answer

# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with reward files."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_beside.py").write_text("VALUE = 2.0\n")
    (tmp_path / "my_rewards.py").write_text(
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
                def grade(self, completions):
                    return [float(len(c)) for c in completions]
            judge = Judge()
            all_of_them = [brevity, judge]
            by_name = {"brevity": brevity, "level": level}
            constant = 5
            def by_position(completions, /):
                return []
            """
        )
    )
    return tmp_path


def load(use):
    return load_reward(RewardConfig(use=use), field="rewards[3].use")


def load_error(use):
    with pytest.raises(UserError) as caught:
        load(use)
    assert str(caught.value).startswith("rewards[3].use: ")
    return str(caught.value)


def test_builtins_files_and_modules_load(folder):
    built = build_rewards(
        [RewardConfig(use=use) for use in ("math", "exact", "format")], columns=["answer"], max_completion_tokens=8
    )
    assert [type(reward.function) for reward in built] == [MathReward, ExactReward, FormatReward]
    assert load("math") is None
    assert load("my_rewards.py:brevity")(["a"]) == [2.0]
    assert load(f"{folder}/my_rewards.py:judge")(["a"]) == [1.0]  # loaded once
    assert load("os.path:join") is os.path.join
    Path("in_cwd.py").write_text("def f(completions):\n    return [4.0]\n")
    assert load("in_cwd:f")([]) == [4.0]
    assert load("my_rewards.py:judge.grade")(["abc"]) == [3.0]


def test_loading_errors_say_what_works(folder):
    (folder / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    (folder / "unparsable.py").write_text("def f(:\n")
    (folder / "no_such_import.py").write_text("import no_such_package\n")
    (folder / "of_a_package.py").write_text("from .utils import x\n")
    for use, words in {
        "maths": ["'maths'", "did you mean math?", "use choice, code, exact, exact_set", "path/to/file.py:function"],
        "my_rewards.py": ["'my_rewards.py:function'"],
        "my_reward.py:brevity": ["no such file", str(folder), "did you mean my_rewards.py?"],
        "my_rewards.py:brevety": ["has no 'brevety'", "did you mean brevity?", "level"],
        "my_rewards.py:constant": ["not callable", "5 (int)"],
        "my_rewards.py:all_of_them": ["not callable", "(list); make an entry for each of its functions"],
        "my_rewards.py:by_name": ["not callable", "(dict); make an entry for each of its functions"],
        "my_rewards.py:judge.graed": ["has no 'judge.graed'", "did you mean grade?"],
        "my_rewards.py:Judge": ["is a class", "Judge()"],
        "broken.py:f": ["ZeroDivisionError: division by zero", f"{folder}/broken.py:2"],
        "unparsable.py:f": ["SyntaxError", f"{folder}/unparsable.py:1"],
        "no_such_import.py:f": ["No module named 'no_such_package'", f"{folder}/no_such_import.py:1"],
        "of_a_package.py:f": ["relative import", f"{folder}/of_a_package.py:1", "use package.module:name"],
        "no_such_module.sub:f": ["no module 'no_such_module'", "working directory"],
        "os.pth:f": ["no module 'os.pth'"],
        "os.path:joim": ["did you mean join?"],
    }.items():
        message = load_error(use)
        for word in [repr(use), *words]:
            assert word in message, (use, message)


TRAINS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
arguments = parser.parse_args()
def score(completions, **kwargs):
    return [1.0 for _ in completions]
"""


def test_a_file_that_parses_arguments_at_import_shows_its_own_usage(folder, capsys, monkeypatch):
    (folder / "trains.py").write_text(TRAINS)
    monkeypatch.setattr(sys, "argv", ["cohort", "train", "--model", "x"])
    message = load_error("trains.py:score")
    assert f"does not import: SystemExit: 2 (at {folder}/trains.py:5); move" in message
    assert "parse_args(), below `if __name__ == '__main__':`" in message
    assert capsys.readouterr().err.startswith("usage: trains.py [-h] --model MODEL")
    assert sys.argv == ["cohort", "train", "--model", "x"]


def test_build_rewards_names_weights_and_defaults(folder):
    configs = [
        RewardConfig(use="math"),
        RewardConfig(use="my_rewards.py:level", weight=-0.5, args={"scale": 3.0}, timeout_s=5),
        RewardConfig(use="my_rewards.py:scaled", name="twice"),
        RewardConfig(use="my_rewards.py:judge"),
    ]
    built = build_rewards(configs, columns=["answer", "difficulty"], max_completion_tokens=8)
    assert [(r.name, r.weight, dict(r.args), r.timeout_s) for r in built] == [
        ("math", 1.0, {}, 300.0),
        ("level", -0.5, {"scale": 3.0}, 5.0),
        ("twice", 1.0, {}, 300.0),
        ("Judge", 1.0, {}, 300.0),
    ]


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("math", {}, "reward 'math' needs the column 'answer', which is neither"),
        ("math", {}, "; did you mean answers? Columns: answers, difficulty, solution; also"),
        ("math", {"answer_columm": "x"}, "did you mean answer_column? It takes: answer_column, deadline_s"),
        ("math", {"answer_column": "answers", "deadline_s": 0}, "args.deadline_s: 0: input should"),
        ("exact", {"answer_column": "answers", "pattern": "(a"}, "args.pattern: '(a': is not a regular expression"),
        ("exact", {"answer_column": "answers", "pattern": "a"}, "exactly 1 group, the answer, but has 0"),
        ("exact_set", {"separator": ""}, "args.separator: '': string should have"),
        ("exact_set", {"ignore_case": "x"}, "args.ignore_case: 'x': input should be a"),
        ("format", {"pattern": 5}, "args.pattern: 5: input should be a valid string"),
        ("format", {"pattern": "["}, "args.pattern: '[': is not a regular expression"),
        ("regex", {}, "args.pattern: missing"),
        ("choice", {"letters": "abc"}, "args.letters: 'abc': must be different capital letters"),
        ("choice", {"first_number": -1}, "args.first_number: -1: input should be"),
        ("number", {"answer_column": "gold"}, "needs the column 'gold'"),
        ("number", {"rel_tol": -1}, "args.rel_tol: -1: input should be greater than or equal to 0"),
        ("number", {"abs_tol": True}, "args: abs_tol: True: must be a number"),
        ("json_schema", {}, "give either schema or schema_column"),
        ("overlong", {}, "rewards.0.args.buffer_tokens: missing; this key is required"),
        ("overlong", {"buffer_tokens": 9}, "buffer_tokens: 9 must be at most 8, the most tokens that can be sampled"),
        ("overlong", {"buffer_tokens": 4, "penalty": -1}, "args.penalty: -1: input should be"),
        ("code", {"score": "most"}, "args.score: 'most': input should be 'all' or 'fraction'"),
        ("code", {"case_s": 0}, "args.case_s: 0: input should be greater than 0"),
        ("code", {"max_tests": 0}, "args.max_tests: 0: input should be greater than or equal to 1"),
        ("code", {"setup": "import"}, "args.setup: 'import': is not Python"),
        ("code", {"setup": "import re", "language": {"c": {"run": "./a"}}}, "setup: import re has no effect with"),
        ("code", {"language": "cpp"}, "args.language: 'cpp': must be python, or"),
        ("code", {"language": {"cpp": {"compile": "g++"}}}, "must be python, or"),
        ("code", {"language": {"../cpp": {"run": "./main"}}}, "must be python, or"),
        ("trl.cosine", {}, "rewards.0.args.max_len: missing"),
        ("open_r1.cosine", {"min_value_wrong": "low"}, "args.min_value_wrong: 'low': input should be a valid number"),
        ("trl.reasoning_accuracy", {"reasoning_delimiters": "x"}, "args.reasoning_delimiters: 'x': must be a list"),
        ("open_r1.repetition_penalty", {}, "args.max_penalty: missing"),
        ("trl.repetition_penalty", {"max_penalty": 1.5}, "max_penalty: 1.5: input should be less than or equal to 0"),
        ("trl.repetition_penalty", {"ngram_size": 0}, "ngram_size: 0: input should be greater than or equal to 1"),
        ("open_r1.repetition_penalty", {"language": "de"}, "args.language: 'de': input should be 'en' or 'zh'"),
        (
            "trl.soft_overlong",
            {"max_completion_len": 8, "soft_punish_cache": 9},
            "must be at most max_completion_len, 8",
        ),
        ("open_r1.code_format", {"language": "("}, "args.language: '(': is not a regular expression"),
        ("open_r1.format", {"pattern": "x"}, "args.pattern: unknown key. It takes: none"),
        ("open_r1.fromat", {}, "no built-in reward 'open_r1.fromat'; did you mean open_r1.format?"),
        ("my_rewards.py:level", {"scael": 1}, "takes no argument 'scael'; did you mean scale?"),
        ("my_rewards.py:level", {"prompts": 1}, "'prompts' is always passed"),
        ("my_rewards.py:brevity", {"answers": 1}, "'answers' is also a column of the dataset"),
        ("my_rewards.py:by_position", {}, "'completions' by position only"),
    ],
)
def test_settings_that_cannot_work_fail_before_the_run(folder, use, args, message):
    columns = ["answers", "difficulty", "solution"]
    with pytest.raises(UserError) as caught:
        build_rewards(configured({"use": use, "args": args}), columns=columns, max_completion_tokens=8)
    assert str(caught.value).startswith(("rewards[0]", "rewards.0.args"))
    assert message in str(caught.value)


def test_check_columns_names_reward_parameter_and_columns():
    def f(completions, answer, extra=None):
        return []

    check_columns(reward(f), ["answer"], field="rewards[1]")
    check_columns(reward(f, args={"answer": 1}), [], field="rewards[1]")
    with pytest.raises(UserError) as caught:
        check_columns(reward(f, name="f"), ["solution", "answers"], field="rewards[1]")
    for word in ["rewards[1]", "reward 'f'", "parameter 'answer'", "Columns: solution, answers", "completion_ids"]:
        assert word in str(caught.value)


def test_a_missing_parameter_names_the_nearest_argument_and_ten_columns():
    columns = [f"column_{i}" for i in range(12)]
    with pytest.raises(UserError) as caught:
        check_columns(reward(lambda completions, completions_ids: []), columns, field="rewards[1]")
    shown = ", ".join(columns[:10])
    assert f"; did you mean completion_ids? Columns: {shown} and 2 more; also available: prompts, " in str(caught.value)
    assert "trainer_state, log_metric, log_extra" in str(caught.value)


def timed(function):
    """A decorator for any function."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def batched(score):
    """A decorator that makes a reward of a function of one text."""

    @functools.wraps(score)
    def wrapper(completions, **columns):
        return [score(text) for text in completions]

    return wrapper


class Grader:
    @timed
    def score(self, completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    __call__ = score


@pytest.mark.parametrize(
    ("function", "names", "has_var_keyword"),
    [
        (batched(len), {"completions"}, True),
        (timed(timed(batched(len))), {"completions"}, True),
        (timed(lambda completions, answer: []), {"completions", "answer"}, False),
        (Grader().score, {"completions", "answer"}, False),
        (Grader(), {"completions", "answer"}, False),
        (functools.partial(timed(lambda completions, answer: []), answer=1), {"completions", "answer"}, False),
    ],
)
def test_a_function_gets_what_its_outermost_decorator_names(function, names, has_var_keyword):
    parameters = keyword_parameters(function)
    assert (parameters.names, parameters.has_var_keyword) == (names, has_var_keyword)
    check_columns(reward(function), ["answer"], field="rewards[0]")


def test_partials_have_the_name_and_the_kind_of_what_they_call():
    class Judge:
        async def __call__(self, completions, factor, **columns):
            return [factor * len(text) for text in completions]

    judge = functools.partial(Judge(), factor=2.0)
    assert (name_of(judge), name_of(functools.partial(timed)), name_of(Judge())) == ("Judge", "timed", "Judge")
    assert RewardRunner([reward(judge)]).score([group("p", ["ab"])])[0].rewards.tolist() == [4.0]


def test_importing_rewards_imports_no_heavy_library():
    program = "import sys, cohort.rewards; print([m for m in ('torch', 'transformers', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- exact and format -------------------------------------------------------------------------------------------


def test_exact():
    f = Builtin("exact")
    assert f([" 42\n", "43", "42"], answer=[42, "42", None]) == [1.0, 0.0, None]
    texts = ["Answer: 1 then Answer: 2 ", [{"role": "assistant", "content": "Answer: 1"}], "none"]
    assert f(texts, pattern=r"Answer: (\d)", solution=["2", "2", "2"], answer_column="solution") == [1.0, 0.0, 0.0]


def test_format_pattern_and_linear_time():
    assert Builtin("format")(["a\nb", "ab"], pattern="a.b") == [1.0, 0.0]
    Builtin("format")(["<think>" + " " * 2_000_000 + "</think>" + " <" * 1_000_000 + "<think>"])


def test_a_reward_that_only_shapes_scores_nothing(folder):
    """The middle completion is as long as the limit, and nobody scored it; the last was scored, and is as long."""
    overlong = reward(
        load_builtin("overlong", {"buffer_tokens": 1}, max_completion_tokens=2), name="overlong", shapes=True
    )
    judge = reward(lambda completions: [1.0, None, 1.0], name="judge")
    g = group("q", ["a", "b", "c"])
    lengths = (1, 2, 2)
    trajectories = tuple(
        answer(g.prompt, np.zeros(n), text=t.text) for t, n in zip(g.trajectories, lengths, strict=True)
    )
    (scored,) = RewardRunner([judge, overlong]).score([dataclasses.replace(g, trajectories=trajectories)])
    assert np.array_equal(scored.rewards, [1.0, math.nan, 0.0], equal_nan=True)
    assert scored.reward_parts["overlong"].tolist() == [0.0, -1.0, -1.0]
    with pytest.raises(UserError, match=r"no reward scored any of the 3 completions of this step: 'silent' returned"):
        RewardRunner([reward(lambda completions: [None] * 3, name="silent"), overlong]).score([g])
    alone = [RewardConfig(use="overlong", args={"buffer_tokens": 1})]
    with pytest.raises(UserError, match=r"rewards: 'overlong' only shapes other rewards"):
        build_rewards(alone, columns=[], max_completion_tokens=2)
    both = [*alone, RewardConfig(use="exact")]
    built = build_rewards(both, columns=["answer"], max_completion_tokens=2)
    assert [f.shapes for f in built] == [True, False]
