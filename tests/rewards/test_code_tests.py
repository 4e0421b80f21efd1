"""Forms of tests, by rows of the data sets, and comparisons of values."""

import json

import pytest

from cohort.rewards.code.row_tests import AssertCase, CallCase, StdinCase, read_tests
from cohort.rewards.code.verdict import equals, same_output
from cohort.sandbox.guest import encode

# google-research-datasets/mbpp, task 11
MBPP = [
    'assert remove_Occ("hello","l") == "heo"',
    'assert remove_Occ("abcda","a") == "bcd"',
]
# openai_humaneval, HumanEval/2, shortened
HUMAN_EVAL = """

METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):
    assert candidate(3.5) == 0.5
    assert abs(candidate(1.33) - 0.33) < 1e-6
"""
# codeparrot/apps, input_output of a call-based problem
APPS_CALL = '{"fn_name": "is_even", "inputs": [[1], [2]], "outputs": [[false], [true]]}'
APPS_STDIN = {"inputs": ["5\n1 2 3\n", ["4", "2 2"]], "outputs": ["6\n", ["4", ""]]}
# livecodebench/code_generation_lite, public_test_cases
LCB_STDIN = '[{"input": "3\\nabc\\n", "output": "YES\\n", "testtype": "stdin"}]'
LCB_CALL = '[{"input": "[1, 2]\\n3", "output": "[0, 1]", "testtype": "functional"}]'
# open-r1/verifiable-coding-problems-python, verification_info
OPEN_R1 = {"language": "python", "test_cases": [{"input": "2\n", "output": "4\n", "type": "stdin_stdout"}]}
OPEN_R1_CALL = {"test_cases": [{"fn_name": "f", "input": [1, 2], "output": 3, "type": "function_call"}]}


def test_mbpp():
    tests = read_tests(MBPP)
    assert tests.cases == (
        CallCase(expression="remove_Occ('hello', 'l')", expected="heo"),
        CallCase(expression="remove_Occ('abcda', 'a')", expected="bcd"),
    )
    assert not tests.shares_interpreter
    row = {"test_list": MBPP, "test_setup_code": "import math", "test_imports": ["import re"]}
    assert read_tests(row).before == "\nimport math\nimport re"
    assert read_tests(json.dumps(row)).cases == tests.cases


def test_human_eval():
    tests = read_tests(HUMAN_EVAL, entry_point="truncate_number")
    assert tests.cases == (
        CallCase(expression="truncate_number(3.5)", expected=0.5),
        CallCase(expression="truncate_number(1.33)", expected=0.33, tolerance=1e-6),
    )
    assert tests.after == "METADATA = {'author': 'jt', 'dataset': 'test'}"
    loop = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"
    assert read_tests({"test": loop, "entry_point": "g"}).cases == (AssertCase(statement=f"{loop}check(g)"),)
    with pytest.raises(ValueError, match="needs the function's name"):
        read_tests(HUMAN_EVAL)


def test_apps_live_code_bench_and_open_r1():
    assert read_tests(APPS_CALL).cases[1] == CallCase(
        function="is_even", arguments=(2,), expected=[True], alternatives=(True,), is_json=True
    )
    assert read_tests(APPS_STDIN).cases == (
        StdinCase(input="5\n1 2 3\n", expected="6\n"),
        StdinCase(input="4\n2 2", expected="4\n"),
    )
    assert read_tests(LCB_STDIN).cases == (StdinCase(input="3\nabc\n", expected="YES\n"),)
    called = CallCase(function="twoSum", arguments=([1, 2], 3), expected=[0, 1], is_json=True)
    for entry_point in ("twoSum", '{"func_name": "twoSum"}', {"func_name": "twoSum"}):  # the last two: `metadata`
        assert read_tests(LCB_CALL, entry_point=entry_point).cases == (called,)
    case = {**json.loads(LCB_CALL)[0], "metadata": {"func_name": "twoSum"}}  # agentica-org/DeepCoder-Preview-Dataset
    assert read_tests([case]).cases == (called,)
    assert read_tests(OPEN_R1).cases == (StdinCase(input="2\n", expected="4\n"),)
    assert read_tests(OPEN_R1_CALL).cases == (CallCase(function="f", arguments=(1, 2), expected=3, is_json=True),)


@pytest.mark.parametrize(
    ("statement", "case"),
    [
        ("assert f(1) == (2, {3})", CallCase(expression="f(1)", expected=(2, {3}))),
        ("assert 2 == f(1)", CallCase(expression="f(1)", expected=2)),
        ("assert f(1) is True", CallCase(expression="f(1)", expected=True, is_same=True)),
        ("assert Solution().f(1) == True", CallCase(expression="Solution().f(1)", expected=True)),
        ("assert sorted(f(1)) == [1]", CallCase(expression="sorted(f(1))", expected=[1])),
        ("assert isclose(f(1), 2.5) == True", AssertCase(statement="assert isclose(f(1), 2.5) == True")),
        ("assert math.isclose(f(1), 2.5) is True", AssertCase(statement="assert math.isclose(f(1), 2.5) is True")),
        ("assert isinstance(f(1), int) == True", AssertCase(statement="assert isinstance(f(1), int) == True")),
        ("assert set(f(1)) == {1}, 'message'", CallCase(expression="set(f(1))", expected={1})),
        ("assert f(1) is x", AssertCase(statement="assert f(1) is x")),
        ("assert f(1) == g(1)", AssertCase(statement="assert f(1) == g(1)")),
        ("assert f(1) == 1 and f(2) == 2", AssertCase(statement="assert f(1) == 1 and f(2) == 2")),
        ("assert f(1) > 1", AssertCase(statement="assert f(1) > 1")),
        ("assert not f(1)", AssertCase(statement="assert not f(1)")),
    ],
)
def test_asserts_become_calls_where_only_a_literal_is_expected(statement, case):
    assert read_tests([statement]).cases == (case,)


def test_statements_that_test_nothing_are_no_tests():
    between = read_tests("x = 1\nassert f(x) == 2\ny = 3\nassert f(y) > 4\nprint(y)")
    assert between.cases == (
        CallCase(expression="f(x)", expected=2, setup="x = 1"),
        AssertCase(statement="y = 3\nassert f(y) > 4"),
    )
    loop = "for x in range(3):\n    assert f(x) == x"
    raises = "with raises(ValueError):\n    f(-1)"
    helper = "def same(x):\n    assert f(x) == x"
    assert read_tests(f"{loop}\n{raises}\n{helper}\nsame(1)\nsame(2)").cases == (
        AssertCase(statement=loop),
        AssertCase(statement=raises),
        AssertCase(statement=f"{helper}\nsame(1)"),
        AssertCase(statement="same(2)"),
    )
    with pytest.raises(ValueError, match="there are no tests"):
        read_tests("x = f(1)\nprint(x)")


def test_pytest_files():
    source = "import pytest\nclass TestA:\n    def test_x(self): ...\n    def helper(self): ...\ndef test_y(): ...\n"
    tests = read_tests(source)
    assert tests.cases == ("test_solution.py::TestA::test_x", "test_solution.py::test_y")
    assert read_tests({"files": {"test_b.py": "def test_z(): ...", "data.txt": "1"}}).cases == ("test_b.py::test_z",)
    with pytest.raises(ValueError, match="not below"):
        read_tests({"files": {"../test_b.py": "def test_z(): ..."}})


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("[]", "no tests"),
        ("x = 1 +", "neither JSON nor Python"),
        (5, "type int"),
        ({"a": 1}, "keys 'a'"),
        ([{"input": 1}], "needs input and output"),
        ([{"input": "1", "output": "2", "testtype": "magic"}], "types magic"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "function's name"),
        (["assert f(1) == 1", 5], "either text or mappings"),
    ],
)
def test_unknown_forms(value, match):
    with pytest.raises(ValueError, match=match):
        read_tests(value)


VALUES = [
    None,
    True,
    0,
    1,
    1.0,
    -2.5,
    "",
    "1",
    [],
    [1, [2]],
    (1, 2),
    (),
    {1, 2},
    {"a": [1]},
    {1: (2,)},
    b"x",
    1j,
    {(1, 2)},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("expected", VALUES, ids=repr)
def test_values_are_equal_as_in_python(value, expected):
    assert equals(json.loads(json.dumps(encode(value))), expected) == (value == expected)


def test_lists_stand_for_tuples_inside_of_dicts():
    assert equals(encode({"a": (1, {"b": (2,)})}), {"a": [1, {"b": [2]}]}, lists_for_tuples=True)
    assert not equals(encode({"a": (1, 2)}), {"a": [1, 2]})


def test_sets_and_dicts_compare_in_any_order():
    assert equals({"s": list(reversed(range(2000)))}, set(range(2000)))
    assert equals({"d": [[i, i] for i in reversed(range(2000))]}, {i: i for i in range(2000)})
    for forged in ([1, 1], [1, {"t": "x"}], [1, {"x": "Same"}], [1, [2]], [1, {"c": ["a"]}], [1, 3]):
        assert not equals({"s": forged}, {1, 2})
    nested: dict = {"t": []}
    for _ in range(900):
        nested = {"t": [nested]}
    assert not equals({"s": [nested]}, {((),)})
    assert equals(encode({(1, frozenset({2.0, b"x"})): 1, 1j: 2}), {(1.0, frozenset({2, b"x"})): 1, 1j: 2})


def test_what_is_not_plain_equals_nothing():
    class Same:
        def __eq__(self, other):
            return True

        __hash__ = None

    assert not any(equals(encode(Same()), expected) for expected in VALUES)
    assert not any(equals({"t": 5}, expected) or equals({"d": [[1]]}, expected) for expected in VALUES)
    assert equals({"t": [1, 2]}, [1, 2], lists_for_tuples=True) and not equals({"t": [1, 2]}, [1, 2])


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  YES  ", "YES", True),
        ("yes", "YES", False),
        ("0.50 1e1", "0.5 10", True),
        ("0.51", "0.5", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("1e999999999", "2", False),
        ("nan", "nan ", True),
        ("NaN", "nan", False),
        ("sNaN", "5", False),
        ("5", "sNaN", False),
    ],
)
def test_outputs_compare_as_in_live_code_bench(output, expected, same):
    assert same_output(output, expected) is same
