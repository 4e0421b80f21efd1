"""The reward `code`: scores, arguments, and completions that were not judged."""

import dataclasses
import json
import marshal
import re
import threading
from pathlib import Path

import pytest
import yaml

from builtin_rewards import Builtin
from cohort.config import config_from_dict
from cohort.config.hardware import SandboxConfig
from cohort.errors import UserError
from cohort.rewards import RewardRunner, check_columns
from cohort.rewards.code import extract_code
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.process import Limits, ProcessResult
from reward_samples import group, reward

MBPP = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 1"]


class Replies:
    """A backend that answers with what it is given, and keeps the requests."""

    name = "replies"
    counts_processes = True
    guest_filter = b""

    def __init__(self, *outputs):
        self.outputs, self.requests = list(outputs), []

    def missing(self):
        return None

    def run(self, settings, request, limits, *, toolchain):
        self.requests.append(marshal.loads(bytes.fromhex(request.decode())))
        output = self.outputs.pop(0)
        lines = [
            json.dumps({**r, "token": self.requests[-1].get("token")}) if "ready" not in r else json.dumps(r)
            for r in output
        ]
        return ProcessResult(
            output="\n".join(lines).encode(), errors=b"no namespaces", ending="exited", exit_code=0, wall_s=0.0
        )


class UsesItsTime:
    """A backend in which all code uses up its wall time."""

    name = "uses its time"
    counts_processes = True
    guest_filter = b""

    def __init__(self):
        self.wall_s = []

    def run(self, settings, request, limits, *, toolchain):
        self.wall_s.append(limits.wall_s)
        output = b'{"ready": true}\n{"begun": true}'
        return ProcessResult(output=output, errors=b"", ending="wall time", exit_code=None, wall_s=limits.wall_s)


def made(*outputs, **args):
    backend = Replies(*outputs)
    sandbox = Sandbox(backend=backend, limits=Limits.of(SandboxConfig()), max_concurrent=1)
    return backend, Builtin("code", args, sandbox=sandbox)


READY, BEGUN = {"ready": True}, {"begun": True}


def test_scores_and_details():
    values = [READY, BEGUN, *({"case": i, "value": v} for i, v in enumerate([3, 4, 0]))]
    _, code = made(values, values)
    assert code(["x"], tests=[MBPP], score="fraction") == [pytest.approx(2 / 3)]
    assert code.last_details == ['{"tests": ["passed", "passed", "wrong value"]}']
    assert code(["x"], tests=[MBPP]) == [0.0]
    assert code.last_counts == {}


def test_expected_values_are_not_sent():
    backend, code = made([READY])
    code(["x"], tests=[["assert f(1) == 57005"]])
    assert backend.requests[0]["cases"] == [{"expression": "f(1)"}]
    assert "57005" not in json.dumps(backend.requests)


def test_setup_runs_before_the_code_in_every_form():
    backend, code = made([READY], [READY], [READY])
    columns = {"test_setup_code": ["import math", None, None]}
    tests = [MBPP, {"inputs": ["1"], "outputs": ["1"]}, "def test_one(): ..."]
    code(["x", "y", "z"], tests=tests, setup="from typing import *", **columns)
    functions, program, files = backend.requests
    assert functions["parts"] == {"before": "from typing import *\nimport math", "code": "x", "after": ""}
    assert program["code"] == "from typing import *\ny"
    assert files["files"]["solution.py"] == "from typing import *\nz"


def test_columns_with_the_names_of_arguments():
    backend, code = made([READY, BEGUN, {"case": 0, "value": 3}], setup_column="setup", tests_column="score")
    f = reward(code.function)
    [scored] = RewardRunner([f]).score([group("q", ["x"], setup="import math", score=["assert add(1, 2) == 3"])])
    assert backend.requests[0]["parts"]["before"] == "import math"
    assert scored.rewards.tolist() == [1.0]


def test_a_sandbox_that_does_not_start_is_tried_again_and_judges_nothing():
    backend, code = made([], [])
    assert code(["x", "x"], tests=[MBPP, MBPP]) == [None, None]
    assert len(backend.requests) == 2
    assert code.last_counts == {"not_judged": 2}
    assert code.last_details == ['{"not_judged": "sandbox did not start: no namespaces"}'] * 2
    _, code = made([], [READY, BEGUN, *({"case": i, "value": v} for i, v in enumerate([3, 4, 1]))])
    assert code(["x"], tests=[MBPP]) == [1.0]


def test_what_the_code_does_not_answer_fails():
    for records in ([BEGUN], [BEGUN, {"case": 0, "value": 3}], [BEGUN, *[{"case": 0, "value": 3}] * 3]):
        _, code = made([READY, *records])
        assert code(["x"], tests=[MBPP]) == [0.0]
    assert code.last_details == ['{"tests": ["several results", "no result", "no result"]}']


def test_forged_errors_are_cut_short():
    _, code = made(*([READY, BEGUN, {"case": 0, "error": error}] for error in ("A" * 900_000, [["A"] * 900_000])))
    for note in ("A" * 300, "failed"):
        assert code(["x"], tests=[["assert f() == 1"]]) == [0.0]
        assert code.last_details == [json.dumps({"tests": [note]})]


def test_records_that_are_nested_too_deep_or_too_many_fail():
    deep = json.loads("[" * 900 + "]" * 900)
    _, code = made([READY, BEGUN, {"test": deep, "passed": True}, {"exit": 0}])
    assert code(["x"], tests=["def test_one(): ..."]) == [0.0]
    _, code = made(*([READY, BEGUN, *[{}] * number, {"case": 0, "value": 1}] for number in (9_998, 10_000)))
    assert [code(["x"], tests=[["assert f() == 1"]]) for _ in range(2)] == [[1.0], [0.0]]
    assert code.last_details == ['{"tests": ["no result"]}']


def test_an_error_in_the_tests_setup_judges_nothing_unless_the_code_may_have_sent_it():
    failed = {"error": "ModuleNotFoundError: No module named 'numpy'", "in": "before"}
    _, code = made([READY, failed], [READY, BEGUN, failed], [READY])
    assert code(["x", "y", "z"], tests=[MBPP, MBPP, MBPP]) == [None, 0.0, None]
    assert code.last_details[2] == '{"not_judged": "the tests\' setup failed: exit code 0"}'


def test_tests_that_no_program_can_pass_judge_nothing():
    _, code = made()
    inputs = [{"input": "x" * 16_000_001, "output": "y"}]
    outputs = [{"input": "x", "output": "y" * 500_000}] * 2
    assert code(["x", "x"], tests=[inputs, outputs]) == [None, None]
    assert code.last_details == [
        '{"not_judged": "an input of 16,000,001 bytes is above sandbox.max_file_size (16,000,000)"}',
        '{"not_judged": "expected outputs of 1,000,000 bytes reach sandbox.max_output (1,000,000)"}',
    ]


def test_rows_without_tests_and_time():
    _, code = made()
    assert code(["x"], tests=[None]) == [None]
    assert code.last_counts == {"no_tests": 1}
    code.function.context = dataclasses.replace(code.context, timeout_s=0.0)
    assert code(["x"], tests=[MBPP]) == [None]
    assert code.last_details == ['{"not_judged": "out of time"}']


def test_code_that_uses_up_the_time_of_all_is_not_judged():
    backend = UsesItsTime()
    sandbox = Sandbox(backend=backend, limits=Limits.of(SandboxConfig(wall_s=30.0)), max_concurrent=1)
    assert Builtin("code", sandbox=sandbox, budget_s=240.0)(["x"], tests=[MBPP]) == [0.0]
    short = Builtin("code", sandbox=sandbox, budget_s=20.0)
    assert short(["x"], tests=[MBPP]) == [None]
    assert short.last_details == ['{"not_judged": "out of time"}']
    assert backend.wall_s[0] == 30.0 and backend.wall_s[1] <= 20.0


def test_a_sandbox_that_does_not_answer_in_time_judges_nothing(monkeypatch):
    answers = threading.Event()
    backend = UsesItsTime()
    monkeypatch.setattr(backend, "run", lambda *a, **k: answers.wait(60) and UsesItsTime().run(*a, **k))
    sandbox = Sandbox(backend=backend, limits=Limits.of(SandboxConfig()), max_concurrent=1)
    assert Builtin("code", sandbox=sandbox, budget_s=0.2)(["x", "y"], tests=[MBPP] * 2) == [None, None]
    answers.set()


def test_completions_of_a_group_that_are_equal_are_judged_once():
    backend, code = made([READY], [READY])
    code(["x", "x", "y"], tests=[MBPP, MBPP, MBPP])
    assert [request["parts"]["code"] for request in backend.requests] == ["x", "y"]


def test_verdicts_are_counted_while_they_are_made_and_timed():
    _, code = made([READY, BEGUN], [READY, BEGUN])
    runner, told = RewardRunner([reward(code.function, name="code")], columns=["tests"]), []
    runner.on_progress = lambda *how: told.append(how)
    runner.score([group("q", ["x", "x", "y"], tests=MBPP)])
    assert told == [("code", 0, 3), ("code", 1, 2), ("code", 2, 2), ("code", 3, 3)]  # two are equal
    assert runner.num_judged == {"code": 3} and runner.seconds["code"] > 0


def test_details_reach_the_scored_groups():
    _, code = made([READY, BEGUN, {"case": 0, "value": 1}])
    runner = RewardRunner([reward(code.function, name="code")], columns=["tests"])
    [scored] = runner.score([group("q", ["x", "x"], tests=["assert f() == 1"])])
    assert scored.rewards.tolist() == [1.0, 1.0]
    assert scored.reward_details == {"code": ('{"tests": ["passed"]}',) * 2}


def test_details_are_those_of_the_rows_that_a_reward_is_for():
    _, code = made([READY, BEGUN, {"case": 0, "value": 1}])
    runner = RewardRunner([reward(code.function, name="code", where={"source": "code"})], columns=["tests", "source"])
    rows = [
        group("q", ["x"], tests=None, source="math"),
        group("q", ["x"], tests=["assert f() == 1"], source="code"),
    ]
    details = [scored.reward_details["code"] for scored in runner.score(rows)]
    assert details == [(None,), ('{"tests": ["passed"]}',)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```python\na\n```\nbetter:\n```py\nb\n```\ndone", "b\n"),
        ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na\n```\nprints\n```\n2\n```", "a\n"),
        ("```\na\n```\nor\n```\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>b", "b"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("```python\nunfinished", "```python\nunfinished"),
    ],
)
def test_the_last_block_is_the_code(text, code):
    assert extract_code(text) == code


def test_blocks_of_other_languages():
    assert extract_code("```python\na\n```\n```cpp\nb\n```", "cpp") == "b\n"


def test_rows_whose_tests_cannot_be_read_are_counted_unless_none_can():
    unreadable = [5, '{"files": ["a"]}', "def check():\n    assert f(1) == 2\n", "[" * 100_000, "((" * 5000]
    _, code = made([READY, BEGUN, {"case": 0, "value": 2}])
    rewards = code(["x"] * 6, tests=[["assert f(1) == 2"], *unreadable], entry_point=["f"] * 6)
    assert rewards == [1.0, None, None, None, None, None]
    assert code.last_counts == {"not_judged": 5, "unreadable_tests": 5}
    assert code.last_details[1:4] == [
        '{"not_judged": "the tests cannot be read: tests of type int are not known"}',
        '{"not_judged": "the tests cannot be read: files is not a mapping of names to text"}',
        '{"not_judged": "the tests cannot be read: check(candidate) needs a parameter, the function under test"}',
    ]
    assert code(["x"], tests=[5]) == [None]


def test_columns():
    _, code = made()
    check_columns(reward(code.function), ["tests"], field="rewards[0]")
    with pytest.raises(UserError, match="needs the column 'tests'"):
        check_columns(reward(code.function), ["test"], field="rewards[0]")
    with pytest.raises(UserError, match=r"the column 'tests' holds 5, which cannot be read as tests"):
        code(["x"], tests=[5])
    with pytest.raises(UserError, match="cpp needs stdin tests"):
        code(["x"], tests=[MBPP], language={"cpp": {"run": "./main"}})


def test_the_configurations_of_the_page():
    """Lines that set `sandbox` alone are alternatives."""
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}, "rewards": [{"use": "code"}]}
    lines = re.findall(r"^sandbox: \{.*", page, re.MULTILINE)
    backends = [config_from_dict({**sections, **yaml.safe_load(line)}).sandbox.backend for line in lines]
    assert backends == ["auto", "bubblewrap", "container", "sandbox_fusion", "auto"]
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("rewards:")]
    configs = [config_from_dict({**sections, **yaml.safe_load(block)}) for block in blocks]
    columns = [made(**config.rewards[0].args)[1].required_columns() for config in configs]
    assert columns == [("tests",), ("private_test_cases",), ("tests",)]
