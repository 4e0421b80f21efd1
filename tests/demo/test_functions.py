"""The task of `cohort demo --task code`: problems, splits, tests, habits and base model."""

import itertools
import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from builtin_rewards import Builtin
from cohort.config import Config
from cohort.config.hardware import SandboxConfig
from cohort.demo import run
from cohort.demo.functions import FunctionProblem, generate, split_of
from cohort.demo.tasks import CODE
from cohort.rewards.code.row_tests import CallCase, FunctionTests, read_tests
from cohort.sandbox.backends import Unconfined
from cohort.sandbox.interpreter import find_interpreter, new_folder
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.process import Limits
from habits import code_demonstration, code_habit
from pretrain import tokenize

_SLIPS = {  # what a model may write for a part of an expression
    "+": "-*",
    "-": "+*",
    "*": "+-",
    **{name: {"max", "min", "sum", "len"} - {name} for name in ("max", "min", "sum", "len")},
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CODE.base_path)


def passes(problem: FunctionProblem, code: str) -> bool:
    """Whether code of this file passes a problem's tests."""
    names: dict[str, object] = {}
    try:
        exec(code, names)
        return all(eval(test["call"], names) == test["expected"] for test in problem.tests)
    except (SyntaxError, TypeError, NameError):
        return False


def test_first_problem_never_changes():
    first = generate(0, 1)[0]
    assert first.question == "Write mark(left, right): left minus right, times 6."
    assert first.answer == "def mark(left, right):\n    return (left - right) * 6"
    assert first.tests == [
        {"call": "mark(9, 19)", "expected": -60},
        {"call": "mark(3, 8)", "expected": -30},
        {"call": "mark(8, 3)", "expected": 30},
    ]


def test_no_calculation_is_in_two_splits():
    train = [problem for seed in range(3) for problem in generate(seed, 2048)]
    development, heldout = (generate(0, 256, split) for split in ("development", "heldout"))
    keys = [{problem.key for problem in problems} for problems in (train, development, heldout)]
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]
    for problems, split in ((train, "train"), (development, "development"), (heldout, "heldout")):
        assert {split_of(problem.key) for problem in problems} == {split}
    for problems in (development, heldout):
        assert len({problem.question for problem in problems}) == 256
        assert len({problem.key for problem in problems}) > 100


def test_the_split_depends_on_the_calculation_alone():
    """Names of functions and parameters do not count: a model that knows a calculation knows it by any name."""
    names = {}
    for problem in generate(0, 3000):
        names.setdefault(problem.key, set()).add((problem.name, problem.parameters))
    assert max(map(len, names.values())) > 10


def test_only_right_code_passes():
    """The solution passes; no number off by one, no other operator and no other function does."""
    for problem in generate(0, 300) + generate(0, 100, "heldout"):
        head, expression = problem.answer.split("return ")
        assert passes(problem, problem.answer)
        for part in re.finditer(r"\d+|[-+*]|max|min|sum|len", expression):
            text = part.group()
            for slip in (int(text) - 1, int(text) + 1) if text.isdigit() else _SLIPS[text]:
                wrong = f"{head}return {expression[: part.start()]}{slip}{expression[part.end() :]}"
                assert not passes(problem, wrong), wrong


def test_expected_values_stay_outside_the_sandbox(tmp_path: Path):
    config = run.demo_config(tmp_path, task=CODE, seed=0)
    run.write_data(tmp_path, config, task=CODE, seed=0)
    for name, number in (("train", 2048), ("development", 256), ("heldout", 256)):
        rows = [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == number and rows[0].keys() == {"question", "answer", "tests"}
        tests = read_tests(rows[0]["tests"])
        assert isinstance(tests, FunctionTests) and len(tests.cases) == 3 and not tests.shares_interpreter
        assert all(isinstance(case, CallCase) for case in tests.cases)


def test_habits_are_mostly_bad_and_only_the_proper_one_passes():
    rng = random.Random(0)
    proper, passed, starts = 0, 0, Counter()
    for problem in generate(0, 1000):
        text = code_habit(problem, rng)[1]["content"]
        proper += text == problem.answer
        passed += passes(problem, text)
        starts[text.startswith("def ")] += 1
    assert 100 < proper == passed < 180
    assert starts[False] > starts[True]  # most start without `def`, and so does a greedy completion


def test_answers_pass_and_habits_fail_in_processes():
    """The answer of another problem fails too."""
    backend = Unconfined(find_interpreter((), new_folder()))
    reward = Builtin("code", sandbox=Sandbox(backend=backend, limits=Limits.of(SandboxConfig()), max_concurrent=2))
    problems = generate(1, 6)
    rng = random.Random(1)
    habits = [code_habit(problem, rng)[1]["content"] for problem in problems]
    proper = [float(text == problem.answer) for problem, text in zip(problems, habits, strict=True)]
    renamed = [f"{b.answer}\n{a.name} = {b.name}" for a, b in itertools.pairwise(problems)]
    texts = [*(problem.answer for problem in problems), *habits, *renamed]
    tests = [problem.tests for problem in [*problems, *problems, *problems[:-1]]]
    assert reward(texts, tests=tests) == [1.0] * 6 + proper + [0.0] * 5


def test_only_the_answer_is_trained():
    problem = generate(0, 1)[0]
    token_ids, labels = tokenize(code_demonstration(problem), tokenizer())
    assert tokenizer().decode([token for token in labels if token >= 0]) == f"{problem.answer}<|end|>"
    assert all(label in (-100, token) for token, label in zip(token_ids, labels, strict=True))


def test_prompts_and_solutions_fit():
    for problem in generate(5, 300):
        token_ids, labels = tokenize(code_demonstration(problem), tokenizer())
        answer = sum(label >= 0 for label in labels)
        assert answer <= CODE.rollout["max_completion_tokens"]
        assert len(token_ids) - answer <= CODE.rollout["max_prompt_tokens"]


def test_a_step_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Without a sandbox, since no backend has this name. tests/display has whole demos."""
    full = run.demo_config

    def short(folder: Path, **options: Any) -> Config:
        config = full(folder, **options)
        changes = {
            "train": {"steps": 1, "prompts_per_step": 2},
            "rollout": {"num_generations": 4},
            "sandbox": {"backend": "container", "container": "no-such-program"},
        }
        sections = {key: getattr(config, key).model_copy(update=update) for key, update in changes.items()}
        return config.model_copy(update=sections)

    monkeypatch.setattr(run, "demo_config", short)
    monkeypatch.setattr(run, "NUM_HELDOUT", 2)
    result = run.run_demo(task="code", seed=0, out=tmp_path / "run")
    rows = pq.read_table(result.run_dir / "completions" / "step-000001.parquet").to_pylist()
    problems = {problem.question: problem for problem in generate(0, 2048)}
    assert len(rows) == 8
    for row in rows:
        assert row["reward"] in (0.0, 1.0)
        if row["completion"] == problems[row["prompt"]].answer:
            assert row["reward"] == 1.0
        if not row["completion"].startswith("def "):
            assert row["reward"] == 0.0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sandbox: none, holds nothing warning: sandbox.confinement: none: code of the model runs with" in shown
    assert "(right: def mark(low, high): ⏎ return min(low, high) - 14)" in shown
