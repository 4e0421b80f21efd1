"""Code that is right passes, whatever part of Python it uses: the guest runs it as the interpreter would."""

import json
import sys
from functools import cache

import pytest

from builtin_rewards import Builtin
from cohort.config.hardware import SandboxConfig
from cohort.sandbox.backends import Unconfined
from cohort.sandbox.interpreter import find_interpreter, new_folder
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.process import Limits
from sandboxes import LIMITS, graded

SUM = [{"input": "2 3\n", "output": "5"}]


@cache
def sandbox() -> Sandbox:
    limits = Limits.of(SandboxConfig(**LIMITS))
    return Sandbox(backend=Unconfined(find_interpreter((), new_folder())), limits=limits, max_concurrent=2)


PROGRAMS = {
    "exit": "print(sum(map(int, input().split())))\nexit()\nprint('not reached')",
    "quit": "print(sum(map(int, input().split())))\nquit(0)",
    "a thread that is not joined": "import threading, time\ndef main():\n    time.sleep(0.05)\n"
    "    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
    "an exit handler": "import atexit, sys\nlines = []\natexit.register(lambda: sys.stdout.write(''.join(lines)))\n"
    "lines.append(str(sum(map(int, input().split()))))",
    "the first standard output": "import io, sys\nsys.stdout = held = io.StringIO()\n"
    "print(sum(map(int, sys.__stdin__.readline().split())))\nsys.__stdout__.write(held.getvalue())",
    "standard input as a file": "import io, os\nlines = io.BytesIO(os.read(0, os.fstat(0).st_size))\n"
    "print(sum(map(int, lines.readline().split())))",
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_right_programs_pass(code):
    assert graded(sandbox(), code, SUM) == 1.0


def test_a_program_that_exits_with_an_error_fails():
    assert graded(sandbox(), "print(5)\nexit('wrong')", SUM) == 0.0


def test_annotations_mean_what_they_mean_in_python():
    undefined = "def f(x: Undefined) -> Nonsense:\n    return x + 1\n"
    evaluates_them = sys.version_info < (3, 14)  # from then on only when they are read (PEP 649)
    assert graded(sandbox(), undefined, ["assert f(1) == 2"]) == float(not evaluates_them)
    evaluated = "def f(x):\n    def g(a: int): pass\n    return g.__annotations__['a'].__name__\n"
    assert graded(sandbox(), evaluated, ["assert f(1) == 'int'"]) == 1.0


def test_functions_that_tests_call_by_name_have_the_names_of_typing():
    code = "class Solution:\n    def most(self, values: List[int]) -> Optional[int]:\n        return max(values)\n"
    tests = [{"input": "[1, 3, 2]", "output": "3", "testtype": "functional"}]
    assert graded(sandbox(), code, tests, entry_point="most") == 1.0


def test_a_value_that_cannot_be_written_loses_its_own_case_only():
    code = "def f(x):\n    return 10**5000 if x == 1 else x\n"
    assert graded(sandbox(), code, ["assert f(1) == 2", "assert f(2) == 2"], score="fraction") == 0.5


@pytest.mark.parametrize("returned", ["[5]", "5"])
def test_a_list_of_one_of_apps_is_the_value_or_wraps_it(returned):
    tests = {"fn_name": "f", "inputs": [[3]], "outputs": [[5]]}
    assert graded(sandbox(), f"def f(x):\n    return {returned}", tests) == 1.0
    assert graded(sandbox(), f"def f(x):\n    return [{returned}]", tests) == float(returned == "5")


def test_keys_of_apps_are_numbers():
    tests = {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"3": 2}]}
    assert graded(sandbox(), "def f(x):\n    return {3: x[1]}", tests) == 1.0


def test_output_may_be_as_long_as_the_limit_whatever_its_characters():
    for text, number in (("1\n", 49_000), ("\x01", 99_000), ("x", 99_999)):
        tests = [{"input": "", "output": text * number}]
        assert graded(sandbox(), f"import sys\nsys.stdout.write({text!r} * {number})", tests) == 1.0
        assert graded(sandbox(), f"import sys\nsys.stdout.write({text!r} * 100_000)", tests) == 0.0


FAILURES_OF_TESTS = {
    "a compiler that is not installed": (
        SUM,
        {"language": {"python": {"compile": "no-such main.py", "run": "./main"}}},
    ),
    "a runtime that is not installed": (SUM, {"language": {"python": {"run": "no-such main.py"}}}),
    "an import of the tests": ("import no_such\nassert f(1) == 2", {}),
    "an import of check": (
        "import no_such\ndef check(g):\n    for x in [1]:\n        assert g(x) == 2",
        {"entry_point": "f"},
    ),
    "setup of a program": (SUM, {"test_setup_code": "import no_such"}),
    "setup that is killed": (["assert f(1) == 2"], {"test_setup_code": "import os\nos.kill(os.getpid(), 9)"}),
    "setup that ends the process": (["assert f(1) == 2"], {"test_setup_code": "import os\nos._exit(0)"}),
}


@pytest.mark.parametrize(("tests", "options"), FAILURES_OF_TESTS.values(), ids=FAILURES_OF_TESTS)
def test_what_is_not_the_fault_of_the_code_is_not_judged(tests, options):
    assert graded(sandbox(), "def f(x):\n    return x + 1", tests, **options) is None


def test_statements_between_asserts_earn_nothing():
    tests = "assert f(1) == 2\ny = 3\nassert f(y) == 4"
    assert graded(sandbox(), "def f(x):\n    return 0", tests, score="fraction") == 0.0
    assert graded(sandbox(), "def f(x):\n    return x + 1", tests, score="fraction") == 1.0


def test_one_is_not_true():
    assert graded(sandbox(), "def f(x):\n    return 1", ["assert f(1) is True"]) == 0.0
    assert graded(sandbox(), "def f(x):\n    return True", ["assert f(1) is True"]) == 1.0


def test_a_program_cannot_outlast_its_time():
    regrouped = "import os, time\nos.setpgid(0, os.getppid())\ntime.sleep(60)"
    flood = "import os\nwhile True:\n    os.write(2, b'x' * 100)"
    reward = Builtin("code", sandbox=sandbox())
    for code in (regrouped, flood):
        assert reward([code], tests=[SUM], case_s=0.1) == [0.0]
        assert json.loads(reward.last_details[0])["tests"][0].startswith("timeout")
