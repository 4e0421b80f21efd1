"""Conditions of a search: the rows that each finds, and what is refused and where."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.config.condition import MAX_CHARACTERS, ConditionError
from cohort_view.run import ViewedRun
from cohort_view.search.condition import Columns, parse
from cohort_view.search.search import Match, Search, search

NAN = float("nan")


def write(run: Path, name: str, columns: dict[str, list[Any]], *, row_group_size: int = 2) -> None:
    """Write a completions file of a run."""
    file = run / "completions" / f"{name}.parquet"
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=row_group_size)


def rows_of(run: Path, where: str, text: str = "") -> list[tuple[str, int]]:
    """Return kind and row of the matches, the newest file first."""
    found = search(ViewedRun(run, "run"), Search(text=text, where=where), lambda: False)
    return [(event.kind, event.row) for event in found if isinstance(event, Match)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a step of single turns, an evaluation and groups that were replaced, which have turns."""
    run = tmp_path_factory.mktemp("run")
    step = {
        "completion": ["So 1 + 1 = 2", "wait, so", "", "Train é", "the end"],
        "prompt": ["1+1?", "A train leaves", "A train leaves", '[{"content": "caf\\u00e9"}]', "why?"],
        "reward": [0.0, 0.5, 1.0, None, NAN],
        "advantage": [-1.0, 0.25, 1.0, 0.0, 0.0],
        "prompt_id": [0, 1, 1, 2, 3],
        "num_tokens": [5, 2, 0, 3, None],
        "end": ["answer", "length", "answer", "length", None],
        "rewards/math": [0.0, 1.0, 1.0, None, 0.0],
        "rewards/my own": [1.0, 1.0, 2.0, 3.0, 4.0],
        "details/math": ['{"answer": "caf\\u00e9"}', None, "{}", None, None],
    }
    write(run, "step-000003", step)
    write(run, "eval-000003", {"completion": ["so", "no"], "reward": [1, 0], "end": ["answer", "answer"]})
    replaced = {
        "completion": ["a", "b", "c"],
        "reward": [0.5, None, None],
        "num_tokens": [1, 1, 9],
        "end": ["max_turns", "timeout", "environment_error"],
        "error": [None, "gone", "refused"],
        "environment/score": [2.0, NAN, None],
    }
    write(run, "replaced-000002", replaced)
    return run


STEP = [("step", i) for i in range(5)]
EVAL = [("eval", i) for i in range(2)]
REPLACED = [("replaced", i) for i in range(3)]


def step(*rows: int) -> list[tuple[str, int]]:
    return [("step", row) for row in rows]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("reward < 0.2 and length > 4", step(0)),
        ("reward < 0.2", [*step(0), ("eval", 1)]),
        ("0.2 > reward", [*step(0), ("eval", 1)]),
        ("reward == 1", [*step(2), ("eval", 0)]),
        ("0 < reward <= 0.5", [*step(1), ("replaced", 0)]),
        ("reward != 0.5 and kind == 'step'", step(0, 2, 4)),
        ("reward is None", [*step(3), ("replaced", 1), ("replaced", 2)]),
        ("reward is not None and step == 3", [*step(0, 1, 2, 4), *EVAL]),
        ("reward == None and kind == 'step'", step(3)),
        ("reward != None and kind == 'step'", step(0, 1, 2, 4)),
        ("not reward >= 0.5 and kind == 'step'", step(0, 3, 4)),
        ("not reward >= 0 and kind == 'step'", step(3, 4)),
        ("not (reward >= 0 or length > 2) and kind == 'step'", step(4)),
        ("not not reward > 0.5", [*step(2), ("eval", 0)]),
        ("reward != reward", step(4)),
        ("reward > advantage and rewards/math == 0", step(0)),
        ("advantage > -1e-3 and advantage < .5", step(1, 3, 4)),
        ("advantage == -1", step(0)),
        ("length < 3", [*step(1, 2), ("replaced", 0), ("replaced", 1)]),
        ("length is None", [*step(4), *EVAL]),
        ("step in (1, 3)", [*STEP, *EVAL]),
        ("step not in [3]", REPLACED),
        ("prompt_id in (0, 2)", step(0, 3)),
        ("reward in (0.5, 9) and kind not in ('replaced',)", step(1)),
        ("step in ()", []),
        ("kind == 'eval'", EVAL),
        ("kind != 'step' and reward > 0", [("eval", 0), ("replaced", 0)]),
        ('end == "length"', step(1, 3)),
        ('end == "answer"', [*step(0, 2), *EVAL]),
        ('end in ("timeout", "max_turns")', [("replaced", 0), ("replaced", 1)]),
        ("end is None", step(4)),
        ('"train" in prompt', step(1, 2)),
        ('"train" not in prompt and "rain" in text', step(3)),
        ('"so" in text', [*step(1), ("eval", 0)]),
        ('"é" in text', step(3)),
        ('"café" in prompt', step(3)),
        ('"café" in details/math', step(0)),
        ('"" in text and step == 2', REPLACED),
        ("text == ''", step(2)),
        ('matches(text, r"\\d \\+ \\d")', step(0)),
        ('matches(text, "(?i)^train|^WAIT")', step(1, 3)),
        ('not matches(text, ".") and kind == "step"', step(2)),
        ('"a" in text == "a"', [("replaced", 0)]),
        ("error is not None", [("replaced", 1), ("replaced", 2)]),
        ('"gone" in error or error == "refused"', [("replaced", 1), ("replaced", 2)]),
        ("rewards/math == 1 and advantage < 1", step(1)),
        ('rewards["my own"] >= 3', step(3, 4)),
        ("environment/score > 1 or tool_calls > 0", [("replaced", 0)]),
        ("not environment/score > 1 and step < 3", [("replaced", 1), ("replaced", 2)]),
        ("group == 1", []),
        ("completion == 'no'", [("eval", 1)]),
        ("1 < 2 and step == 2", REPLACED),
    ],
)
def test_conditions_find_these_rows(run: Path, where: str, expected: list[tuple[str, int]]):
    assert rows_of(run, where) == expected


def test_text_is_found_in_any_case_and_together_with_a_condition(run: Path):
    assert rows_of(run, "", "SO") == [*step(0, 1), ("eval", 0)]
    assert rows_of(run, "reward > 0", "so") == [*step(1), ("eval", 0)]
    assert rows_of(run, "", "1 + 1") == step(0)
    assert rows_of(run, "", "") == [*STEP, *EVAL, *REPLACED]


COLUMNS = Columns([["reward", "rewards/math", "rewards/my own `x`", "rewards/class", "details/math"]])


def test_columns_are_listed_as_conditions_name_them():
    names = [column.name for column in COLUMNS.listed()]
    assert names[:3] == ["text", "reward", "length"]
    assert names[-4:] == ["details/math", "rewards['class']", "rewards/math", "rewards['my own `x`']"]
    for column in COLUMNS.listed():
        parse("", f"{column.name} is None", COLUMNS)


@pytest.mark.parametrize(
    ("where", "position", "message"),
    [
        ("  lenght > 5", 2, "there is no column lenght; did you mean length?"),
        ("rewards.mth == 0", 0, "there is no column rewards.mth; did you mean rewards/math?"),
        ("kind == eval", 8, "there is no column eval; text is in quotes"),
        ("'é' == text and xyzzy < 1", 16, "there is no column xyzzy; text is in quotes"),
        ("end == length", 7, "cannot compare text with number; text is in quotes"),
        ("reward < 'high'", 9, "cannot compare number with text; text is in quotes"),
        ("reward < True", 9, "expected a column, a number or text in quotes, found True"),
        ("reward is 1", 10, "is compares with None only: write =="),
        ('"a" in reward', 7, "reward is a number: compare it, as in reward > 0"),
        ("matches(reward, 'a')", 8, "reward is a number: compare it, as in reward > 0"),
        ("step in 3", 0, "expected text in quotes before in, or values after it, as in step in (1, 2)"),
        ("reward <", 8, "invalid syntax"),
        ("(reward < 1", 0, "'(' was never closed"),
        ("reward < 1)", 10, "unmatched ')'"),
        ("'é' in text and 'b", 16, "unterminated string literal"),
        ('matches(text, "ab(c")', 14, "invalid regular expression: missing ): ab(c"),
        ('matches(text, "ab(?=c)")', 14, "invalid regular expression: invalid perl operator: (?="),
        ("reward < 1" + 400 * "0", None, "the condition has a text or number that no row can have"),
        ("text == '\\ud800'", None, "the condition has a text or number that no row can have"),
        ("'\ud800' in text", None, "the condition has a text or number that no row can have"),
        ("reward < 1" + MAX_CHARACTERS * " ", None, "a condition has at most 1,000 characters"),
        (
            'matches(text, "b|\\pL{400}") or matches(text, "c|\\pL{400}")',
            None,
            "the regular expressions are too large together",
        ),
    ],
)
def test_errors_say_what_is_wrong_and_where(where: str, position: int | None, message: str):
    with pytest.raises(ConditionError) as error:
        parse("", where, COLUMNS)
    assert (error.value.position, str(error.value)) == (position, message)


@pytest.mark.parametrize(
    "where",
    [
        "reward",
        "not reward",
        "__import__('os').system('x')",
        "text.__class__ == 'a'",
        "text.lower() == 'a'",
        "len(text) > 3",
        "reward + 1 > 2",
        "reward < (1 if True else 2)",
        "(reward := 1) > 0",
        "reward < 1, reward > 2",
        "matches(text, prompt)",
        "matches(text, pattern='a')",
        "reward < 1j",
        "(" * 300,
        "a\0b",
    ],
)
def test_all_else_of_python_is_refused(where: str):
    with pytest.raises(ConditionError):
        parse("", where, COLUMNS)


PIECES = ["(", ")", "not ", " and ", " or ", " in ", " is ", "None", "matches(", "text", "reward"]
PIECES += ["<", "==", ",", "1", '"', "'", "-"]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(st.characters(), max_size=40), st.lists(st.sampled_from(PIECES), max_size=400).map("".join)))
def test_any_text_is_a_condition_or_an_error_with_a_place_in_it(where: str):
    try:
        parse("", where, COLUMNS)
    except ConditionError as error:
        assert error.position is None or 0 <= error.position <= len(where)


# The reference: a condition as text beside a function of a row, in which comparisons with None are false.
Pair = tuple[str, Callable[[dict[str, Any]], bool]]
NUMBERS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
NUMBER_COLUMNS = st.sampled_from(["reward", "rewards/math", "length", "step", "advantage"])
TEXT_COLUMNS = st.sampled_from(["text", "end", "kind", "error"])
TEXTS = st.lists(st.sampled_from(["a", "B", "é", "😀", "'", "\n", "."]), max_size=3).map("".join) | st.sampled_from(
    ["step", "length", "answer", "timeout"]
)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def compare(column: str, name: str, value: Any) -> Pair:
    return f"{column} {name} {value!r}", lambda row: row[column] is not None and OPERATORS[name](row[column], value)


def is_in(column: str, values: list[Any]) -> Pair:
    return f"{column} in {values!r}", lambda row: row[column] in values


def contains(text: str, column: str) -> Pair:
    return f"{text!r} in {column}", lambda row: row[column] is not None and text in row[column]


def is_none(column: str) -> Pair:
    return f"{column} is None", lambda row: row[column] is None


def both(a: Pair, b: Pair) -> Pair:
    return f"({a[0]} and {b[0]})", lambda row: a[1](row) and b[1](row)


def either(a: Pair, b: Pair) -> Pair:
    return f"({a[0]} or {b[0]})", lambda row: a[1](row) or b[1](row)


def negation(a: Pair) -> Pair:
    return f"(not {a[0]})", lambda row: not a[1](row)


CONDITIONS = st.recursive(
    st.one_of(
        st.builds(compare, NUMBER_COLUMNS, st.sampled_from(list(OPERATORS)), NUMBERS),
        st.builds(compare, TEXT_COLUMNS, st.sampled_from(list(OPERATORS)), TEXTS),
        st.builds(is_in, NUMBER_COLUMNS, st.lists(NUMBERS, max_size=3)),
        st.builds(contains, TEXTS, TEXT_COLUMNS),
        st.builds(is_none, st.one_of(NUMBER_COLUMNS, TEXT_COLUMNS)),
    ),
    lambda some: st.one_of(st.builds(negation, some), st.builds(both, some, some), st.builds(either, some, some)),
    max_leaves=6,
)
ROW = st.fixed_dictionaries(
    {
        "text": TEXTS,
        "length": st.none() | st.integers(0, 3),
        "reward": st.none() | NUMBERS | st.just(NAN),
        "advantage": NUMBERS | st.just(NAN),
        "end": st.sampled_from(["timeout", "length", None]),
        "error": st.none() | TEXTS,
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(condition=CONDITIONS, rows=st.lists(ROW, min_size=1, max_size=7))
def test_results_equal_evaluation_row_by_row(tmp_path: Path, condition: Pair, rows: list[dict]):
    where, holds = condition
    names = {"text": "completion", "length": "num_tokens"}
    table = {names.get(name, name): [row[name] for row in rows] for name in rows[0]}
    write(tmp_path, "step-000002", table)
    facts = {"rewards/math": None, "step": 2.0, "kind": "step"}
    write(tmp_path, "eval-000001", {"rewards/math": [1.0]})
    expected = [("step", i) for i, row in enumerate(rows) if holds(row | facts)]
    empty = dict.fromkeys(rows[0]) | {"rewards/math": 1.0, "step": 1.0, "kind": "eval"}
    assert rows_of(tmp_path, where) == expected + [("eval", 0)] * holds(empty)
