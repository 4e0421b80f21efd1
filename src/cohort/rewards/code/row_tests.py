"""Read the tests of a row: what to run in the sandbox, and what to expect of it outside.

Forms: stdin/stdout cases and function calls of LiveCodeBench, APPS, TACO and Open-R1; `assert` tests of MBPP and
HumanEval; pytest files. `assert call == literal` becomes a call, whose expected value stays out of the sandbox.
"""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Signatures of functions that tests call by name use `List` and others without an import, as LeetCode's do.
PRELUDE = "from typing import *"
_CHECKS = {*dir(builtins), "isclose", "allclose", "array_equal"}  # whose result says what is expected of the code


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """A value to compute, and the value expected."""

    expected: Any
    alternatives: tuple[Any, ...] = ()  # further values that are right
    expression: str | None = None  # Python source, or
    function: str | None = None  # a function, or method of a class `Solution`, with
    arguments: tuple[Any, ...] = ()
    is_json: bool = False  # `expected` comes from JSON, where tuples are lists
    tolerance: float | None = None  # absolute
    is_same: bool = False  # whether the type must be the same, too
    setup: str = ""  # statements that run first

    def request(self) -> dict[str, Any]:
        """Return what the sandbox is told."""
        if self.expression is not None:
            return {"expression": self.expression} | ({"setup": self.setup} if self.setup else {})
        return {"function": self.function, "arguments": self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertCase:
    """Statements that must not raise. They run in the interpreter of the code that they test."""

    statement: str

    def request(self) -> dict[str, Any]:
        """Return what the sandbox is told."""
        return {"statement": self.statement}


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """Standard input, and the output expected."""

    input: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Cases that run in one interpreter, after `before`, the code and `after`."""

    cases: tuple[CallCase | AssertCase, ...]
    before: str = ""
    after: str = ""

    @property
    def shares_interpreter(self) -> bool:
        """Whether the verdict rests on tests that run in the same interpreter as the code."""
        return any(isinstance(case, AssertCase) for case in self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """Cases that each run the program once."""

    cases: tuple[StdinCase, ...]
    before: str = ""  # of programs in Python
    shares_interpreter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestTests:
    """Test files; the code is the module `solution`."""

    files: Mapping[str, str]
    cases: tuple[str, ...]  # node ids, without parameters
    before: str = ""
    shares_interpreter: bool = True


Tests = FunctionTests | ProgramTests | PytestTests


def first(tests: Tests, number: int | None) -> Tests:
    """Return the first tests, or all of test files, which run as a whole."""
    cases: Any = tests.cases[:number]
    return tests if isinstance(tests, PytestTests) else replace(tests, cases=cases)


def read_tests(value: Any, *, entry_point: str | None = None, setup: str = "") -> Tests:
    """Read a row's tests.

    Args:
        value: the column's value, as text of JSON or Python, or as lists and dicts.
        entry_point: name of the function under test, or LiveCodeBench's `metadata`, for forms that do not contain it.
        setup: statements that run before the code, such as imports.

    Raises:
        ValueError: the form is not known, or there are no tests.
    """
    entry_point = _function_name(entry_point)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            tests = _of_source(value, entry_point)
            return _checked(tests, setup)
    if isinstance(value, Mapping):
        return _of_mapping(value, entry_point, setup)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _checked(_of_list(list(value), entry_point), setup)
    raise ValueError(f"tests of type {type(value).__name__} are not known")


def _checked(tests: Tests, setup: str) -> Tests:
    if not tests.cases:
        raise ValueError("there are no tests")
    if not isinstance(tests, FunctionTests):
        return replace(tests, before=setup)
    by_name = any(isinstance(case, CallCase) and case.function is not None for case in tests.cases)
    parts = (PRELUDE if by_name else "", setup, tests.before)
    return replace(tests, before="\n".join(filter(None, parts)))


def _of_mapping(value: Mapping[str, Any], entry_point: str | None, setup: str) -> Tests:
    if "inputs" in value and "outputs" in value:  # APPS, TACO
        return _checked(_of_inputs(value["inputs"], value["outputs"], value.get("fn_name") or entry_point), setup)
    if "test_cases" in value:  # Open-R1
        return read_tests(value["test_cases"], entry_point=value.get("fn_name") or entry_point, setup=setup)
    if "test_list" in value:  # MBPP
        lines = [value.get("test_setup_code") or "", *(value.get("test_imports") or ())]
        return read_tests(value["test_list"], entry_point=entry_point, setup="\n".join([setup, *lines]))
    if "test" in value:  # HumanEval
        return read_tests(value["test"], entry_point=value.get("entry_point") or entry_point, setup=setup)
    if "files" in value:
        return _checked(_of_files(value["files"]), setup)
    raise ValueError(
        f"tests with the keys {', '.join(map(repr, list(value)[:5]))} are not known; use inputs and outputs, "
        "test_cases, test_list, test, or files"
    )


def _of_list(items: list[Any], entry_point: str | None) -> Tests:
    if all(isinstance(item, str) for item in items):
        return _of_source("\n".join(items), entry_point)
    if not all(isinstance(item, Mapping) for item in items):
        raise ValueError("a list of tests holds either text or mappings")
    if all("call" in item and "expected" in item for item in items):
        return FunctionTests(
            cases=tuple(CallCase(expression=i["call"], expected=i["expected"], is_json=True) for i in items)
        )
    if not all("input" in item and "output" in item for item in items):
        raise ValueError("each test needs input and output, or call and expected")
    kinds = {str(item.get("testtype") or item.get("type") or "stdin") for item in items}
    if kinds <= {"stdin", "stdin_stdout"}:
        return ProgramTests(cases=tuple(_stdin_case(item["input"], item["output"]) for item in items))
    if kinds <= {"functional", "function_call"}:
        return FunctionTests(cases=tuple(_functional_case(item, entry_point) for item in items))
    raise ValueError(f"tests of the types {', '.join(sorted(kinds))} are not known; use stdin or functional")


def _of_inputs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> Tests:
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        return ProgramTests(cases=tuple(_stdin_case(given, expected) for given, expected in pairs))
    return FunctionTests(cases=tuple(_apps_case(function, given, expected) for given, expected in pairs))


def _apps_case(function: str, given: Sequence[Any], expected: Any) -> CallCase:
    """Read a function case of APPS: a value may be wrapped in a list of one; keys are numbers where they can be."""
    values = [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]
    first, *others = map(_with_number_keys, values)
    arguments = tuple(map(_with_number_keys, given))
    return CallCase(function=function, arguments=arguments, expected=first, alternatives=tuple(others), is_json=True)


def _with_number_keys(value: Any) -> Any:
    """Return a dict of JSON with whole numbers as keys, if all its keys are such; other values as they are."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def _stdin_case(given: Any, expected: Any) -> StdinCase:
    def text(value: Any) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    return StdinCase(input=text(given), expected=text(expected))


def _functional_case(item: Mapping[str, Any], entry_point: str | None) -> CallCase:
    """Read a case of LiveCodeBench: one JSON value per line and argument."""
    function = item.get("fn_name") or _function_name(item.get("metadata")) or entry_point
    if not function:
        raise ValueError("functional tests need the function's name: fn_name, or the column entry_point")
    arguments, expected = item["input"], item["output"]
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
    if isinstance(expected, str):
        expected = json.loads(expected)
    return CallCase(function=function, arguments=tuple(arguments), expected=expected, is_json=True)


def _function_name(value: Any) -> Any:
    """Return the name in LiveCodeBench's `metadata` (a mapping, or its JSON text); other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    return value.get("func_name") if isinstance(value, Mapping) else value


def _of_files(files: Mapping[str, str]) -> PytestTests:
    if not isinstance(files, Mapping):
        raise ValueError("files is not a mapping of names to text")
    found = []
    for name, text in files.items():
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the file {name!r} is not below the tests' folder")
        if name.rpartition("/")[2].startswith("test_"):
            found += [f"{name}::{test}" for test in _test_names(_parsed(text).body)]
    return PytestTests(files=dict(files), cases=tuple(found))


def _test_names(body: Sequence[ast.stmt], prefix: str = "") -> list[str]:
    names = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            names.append(prefix + node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names += _test_names(node.body, f"{prefix}{node.name}::")
    return names


def _of_source(source: str, entry_point: str | None) -> FunctionTests | PytestTests:
    """Read Python: HumanEval's `check(candidate)`, a pytest file, or statements with asserts."""
    tree = _parsed(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in functions:
        return _of_check(tree, functions["check"], entry_point)
    if _test_names(tree.body):
        return _of_files({"test_solution.py": source})
    return FunctionTests(cases=_cases_of(tree.body), before=_imports(tree.body))


def _cases_of(body: Sequence[ast.stmt]) -> tuple[CallCase | AssertCase, ...]:
    """Return a case per statement that tests something, with the statements before it that do not."""
    helpers = {node.name for node in body if isinstance(node, ast.FunctionDef) and _asserts(node, set())}
    cases: list[CallCase | AssertCase] = []
    setup: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not _asserts(node, helpers):
            setup.append(ast.unparse(node))
            continue
        case = _case_of(node)
        if isinstance(case, CallCase):
            cases.append(replace(case, setup="\n".join(setup)))
        else:
            cases.append(replace(case, statement="\n".join([*setup, case.statement])))
        setup = []
    return tuple(cases)


def _asserts(node: ast.stmt, helpers: set[str]) -> bool:
    """Whether a statement contains an assert, `raises`, or a call of a helper with asserts."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            name = inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
            if name in helpers or name.startswith(("assert", "raises")):
                return True
    return False


def _of_check(tree: ast.Module, check: ast.FunctionDef, entry_point: str | None) -> FunctionTests:
    """Read HumanEval's form. A body of convertible asserts alone becomes calls; any other runs as one statement."""
    if not entry_point:
        raise ValueError("check(candidate) needs the function's name: the column entry_point")
    if not check.args.args:
        raise ValueError("check(candidate) needs a parameter, the function under test")
    whole = ast.unparse(tree)
    before, others = _imports(tree.body), [node for node in tree.body if node is not check]
    body = [node for node in check.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    body = [_renamed(node, check.args.args[0].arg, entry_point) for node in body if ast.unparse(node) != "assert True"]
    cases = [_case_of(node) for node in body]
    if body and all(isinstance(case, CallCase) for case in cases):
        return FunctionTests(cases=tuple(cases), before=before, after="\n".join(map(ast.unparse, others)))
    return FunctionTests(cases=(AssertCase(statement=f"{whole}\ncheck({entry_point})"),), before=before)


def _imports(body: Sequence[ast.stmt]) -> str:
    """Return the imports of tests: before the code, where one that fails is not the code's fault."""
    imports = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(text for text in map(ast.unparse, imports) if "solution" not in text)


def _case_of(node: ast.stmt) -> CallCase | AssertCase:
    """Convert `assert call == literal`, `assert call is True` and comparisons within a tolerance."""
    test = node.test if isinstance(node, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if isinstance(operator, ast.Eq) or (isinstance(operator, ast.Is) and _is_singleton(right)):
            for computed, expected in ((left, right), (right, left)):
                if _is_unknown(computed, expected):
                    value, is_same = ast.literal_eval(expected), isinstance(operator, ast.Is)
                    return CallCase(expression=ast.unparse(computed), expected=value, is_same=is_same)
        if isinstance(operator, ast.Lt | ast.LtE) and _is_literal(right) and (near := _difference(left)) is not None:
            expected = ast.literal_eval(near[1])
            return CallCase(expression=ast.unparse(near[0]), expected=expected, tolerance=ast.literal_eval(right))
    return AssertCase(statement=ast.unparse(node))


def _is_unknown(computed: ast.expr, expected: ast.expr) -> bool:
    """Whether a value is for the code to find out: not the result of a check such as `isclose(f(1), 2.5) == True`."""
    if not (isinstance(computed, ast.Call) and _is_literal(expected)):
        return False
    function = computed.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):  # of an object
        function = function.value.func
    is_of_code = isinstance(function, ast.Name) and function.id not in _CHECKS
    return is_of_code or not (isinstance(expected, ast.Constant) and isinstance(expected.value, bool))


def _difference(node: ast.expr) -> tuple[ast.Call, ast.expr] | None:
    """Return the parts of `abs(call - literal)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "abs" and node.args):
        return None
    inside = node.args[0]
    if not (isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Sub)):
        return None
    for computed, expected in ((inside.left, inside.right), (inside.right, inside.left)):
        if isinstance(computed, ast.Call) and _is_literal(expected):
            return computed, expected
    return None


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _renamed(node: ast.stmt, old: str, new: str) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == old:
            inner.id = new
    return node


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the tests are neither JSON nor Python ({error.msg}, line {error.lineno})") from error
