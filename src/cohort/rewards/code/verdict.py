"""Judge what came back from the sandbox. Everything in there may be forged, except what it cannot know."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from cohort.rewards.code.row_tests import CallCase, FunctionTests, ProgramTests, PytestTests, StdinCase, Tests
from cohort.sandbox import JobResult
from cohort.sandbox.guest import MAX_DEPTH, MAX_ERROR_CHARS, encode

_MAX_NUMBER_CHARS = 400


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """Whether each case passed, with a word on those that did not; None if nothing was judged."""

    passed: tuple[bool, ...] | None
    notes: tuple[str, ...]  # per case; one if nothing was judged
    shares_interpreter: bool = False


def judge(tests: Tests, outcome: JobResult, token: str) -> CodeVerdict:
    """Compare the records of a run with what the tests expect.

    Args:
        tests: the tests of the row.
        outcome: of the job that ran them.
        token: secret of the job, which records of tests in a shared interpreter must repeat.
    """
    if not outcome.started:
        return CodeVerdict(None, (f"sandbox did not start: {outcome.errors[-200:]}",))
    records = outcome.records
    # the guest sends "begun" before it runs the code, so what comes in its place cannot be the code's
    if not records or records[0].get("begun") is not True:
        how = outcome.ending if outcome.ending != "exited" else f"exit code {outcome.exit_code}"
        error = records[0].get("error") if records else how
        return CodeVerdict(None, (f"the tests' setup failed: {error}",))
    if not isinstance(tests, ProgramTests):
        records = tuple(record for record in records if record.get("token") == token)
    if isinstance(tests, PytestTests):
        results = _of_tests(tests.cases, records)
        if not any(record.get("exit") == 0 for record in records):
            results = [note or "pytest did not finish" for note in results]
    else:
        results = _of_cases(tests.cases, records, outcome)
    return CodeVerdict(tuple(not note for note in results), tuple(results), tests.shares_interpreter)


def job_request(tests: Tests, code: str, token: str, *, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sandbox is told: never the expected values.

    Args:
        tests: the tests of the row.
        code: the completion's code.
        token: see `judge`.
        options: further settings of programs: `run`, `compile`, `file`, `case_s`, `max_output`, `stop_early`.
    """
    before = tests.before if options["run"] is None else ""
    if before and not isinstance(tests, FunctionTests):
        code = f"{before}\n{code}"
    if isinstance(tests, ProgramTests):
        cases = [{"input": case.input} for case in tests.cases]
        return {"kind": "program", "before": before, "code": code, "cases": cases, **options}
    if isinstance(tests, PytestTests):
        files = {**tests.files, "solution.py": code}
        return {
            "kind": "pytest",
            "token": token,
            "before": before,
            "files": files,
            "tests": sorted({t.split("::")[0] for t in tests.cases}),
        }
    parts = {"before": tests.before, "code": code, "after": tests.after}
    return {"kind": "functions", "token": token, "parts": parts, "cases": [case.request() for case in tests.cases]}


def _of_cases(cases: Sequence[Any], records: Sequence[Mapping[str, Any]], outcome: JobResult) -> list[str]:
    """Return why each case failed, "" if it passed."""
    by_case: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    errors = []
    for record in records:
        case = record.get("case")
        if isinstance(case, int) and 0 <= case < len(cases):
            by_case[case].append(record)
        elif "error" in record and "case" not in record:
            errors.append(record["error"])
    missing = (_text(errors[0]) if errors else "") or (outcome.ending if outcome.ending != "exited" else "no result")
    return [_of_case(case, by_case[i]) if i in by_case else missing for i, case in enumerate(cases)]


def _of_case(case: Any, own: Sequence[Mapping[str, Any]]) -> str:
    """Return why a case with these records failed, "" if it passed."""
    if len(own) > 1:
        return "several results"
    [record] = own
    if "error" in record:
        return f"{_text(record.get('exit'))} {_text(record['error'])}".strip() or "failed"
    if isinstance(case, StdinCase):
        if record.get("exit") != 0:
            return f"exit {_text(record.get('exit'))}"
        output = record.get("output")
        return "" if isinstance(output, str) and same_output(output, case.expected) else "wrong output"
    if isinstance(case, CallCase):
        return "" if _is_expected(record.get("value"), case) else "wrong value"
    return "" if record.get("passed") is True else "failed"


def _text(value: Any) -> str:
    """Return a record's short text or number, which may be forged."""
    return str(value)[:MAX_ERROR_CHARS] if isinstance(value, str | int) else ""


def _of_tests(tests: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why each test of pytest failed, "" if it passed."""
    by_name: dict[str, list[tuple[str, bool]]] = defaultdict(list)  # without parameters
    for record in records:
        name = record.get("test")
        if isinstance(name, str):
            by_name[name.partition("[")[0]].append((name, record.get("passed") is True))
    results = []
    for test in tests:
        named = by_name.get(test.partition("[")[0], ())
        own = [passed for name, passed in named if name == test or name.startswith(f"{test}[")]
        results.append(("" if all(own) else "failed") if own else "no result")
    return results


def _is_expected(value: Any, case: CallCase) -> bool:
    if case.is_same and type(value) is not type(case.expected):
        return False
    if case.tolerance is None:
        return any(equals(value, e, lists_for_tuples=case.is_json) for e in (case.expected, *case.alternatives))
    is_number = isinstance(value, int | float)
    try:
        return is_number and bool(abs(value - case.expected) <= case.tolerance)
    except (OverflowError, TypeError):
        return False


def equals(value: Any, expected: Any, *, lists_for_tuples: bool = False) -> bool:
    """Whether a value that the guest encoded equals an expected one, by Python's rules.

    It takes linear time but for the sorting of sets and dicts, and hashes nothing, since hashes may be chosen to
    collide. Nothing is equal that is nested deeper than the guest can encode.

    Args:
        value: JSON with the guest's tags for tuples, sets, dicts, bytes and complex numbers.
        expected: a plain Python value.
        lists_for_tuples: whether a list and a tuple may be equal.
    """
    try:
        found, wanted = (_canonical(v, lists_for_tuples, depth=0) for v in (value, encode(expected)))
    except (ValueError, TypeError):
        return False
    return bool(found == wanted)


def _canonical(value: Any, lists_for_tuples: bool, depth: int = 0) -> Any:
    """Return texts, and lists of them, that are equal for equal values such as 1, 1.0 and True.

    Raises:
        ValueError, TypeError: it holds NaN, which equals nothing, is nested too deep, or the guest did not encode it.
    """
    if isinstance(value, str):
        return f"'{value}"
    if value is None:
        return "None"
    if isinstance(value, (int, float)):
        if value != value:
            raise ValueError("NaN equals nothing")
        return hex(int(value)) if isinstance(value, int) or value.is_integer() else value.hex()
    [(tag, content)] = [("l", value)] if isinstance(value, list) else value.items()
    if tag == "b" and isinstance(content, str):
        return [tag, content]
    if depth > MAX_DEPTH or not isinstance(content, list):
        raise ValueError("not a value of the guest")
    if tag == "d":
        items = [[_canonical(part, lists_for_tuples, depth + 1) for part in pair] for pair in content]
    else:
        items = [_canonical(item, lists_for_tuples, depth + 1) for item in content]
    if tag in ("s", "d"):
        items.sort(key=repr)
    return ["l" if tag == "t" and lists_for_tuples else tag, *items]


def same_output(output: str, expected: str) -> bool:
    """Compare outputs as LiveCodeBench does: stripped lines equal, or all their numbers."""
    lines, wanted = output.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    line, wanted = line.strip(), wanted.strip()
    if line == wanted:
        return True
    if len(line.split()) != len(wanted.split()):
        return False
    numbers, expected = _numbers(line), _numbers(wanted)
    return numbers is not None and numbers == expected


def _numbers(line: str) -> list[Decimal] | None:
    words = line.split()
    if any(len(word) > _MAX_NUMBER_CHARS for word in words):
        return None
    try:
        numbers = [Decimal(word) for word in words]
    except InvalidOperation:
        return None
    return numbers if all(number.is_finite() for number in numbers) else None
