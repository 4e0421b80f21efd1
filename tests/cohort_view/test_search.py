"""Search over a run's completions files: what it finds, in which order, and what damaged or huge files do to it."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.run.completions import upgrade
from cohort_view.run import ViewedRun
from cohort_view.search.evaluate import positive_patterns
from cohort_view.search.grammar import (
    And,
    Compare,
    Contains,
    IsIn,
    IsNull,
    Matches,
    Node,
    Not,
    Or,
    QuerySyntaxError,
    to_text,
)
from cohort_view.search.search import Done, Match, Progress, columns, parse, search

Row = dict[str, Any]


def row(**values: Any) -> Row:
    """A completion as a test states it."""
    return {"prompt_id": 0, "prompt": "1+1?", "text": "", "length": 1, "reward": 0.0, "finish_reason": "stop"} | values


def write(folder: Path, name: str, rows: Sequence[Row], *, row_group_size: int = 100, is_older: bool = False) -> Path:
    """Write a completions file of a run folder, as an older version did if `is_older`."""
    names = {"text": "completion"}
    columns = {names.get(key, key): [r[key] for r in rows] for key in rows[0] if key != "length"}
    columns["completion_token_ids"] = pa.array(
        [None if r["length"] is None else [7] * r["length"] for r in rows], pa.list_(pa.int32())
    )
    file = folder / "completions" / f"{name}.parquet"
    file.parent.mkdir(exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table if is_older else upgrade(table), file, row_group_size=row_group_size)
    return file


def events_of(folder: Path, query: str, limit: int = 100) -> list[Match | Progress | Done]:
    return list(search(ViewedRun(folder, "run"), query, limit, lambda: False))


def matches_of(folder: Path, query: str, limit: int = 100) -> list[Match]:
    return [event for event in events_of(folder, query, limit) if isinstance(event, Match)]


def found(folder: Path, query: str, limit: int = 100) -> list[tuple[str, int, int]]:
    """Kind, step and row of each match, in order."""
    return [(match.kind, match.step, match.row) for match in matches_of(folder, query, limit)]


def done(folder: Path, query: str, limit: int = 100) -> Done:
    last = events_of(folder, query, limit)[-1]
    assert isinstance(last, Done)
    return last


# The reference: one row at a time, in Python.
COMPARE = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def holds(node: Node, values: Row) -> bool:
    match node:
        case Not(condition):
            return not holds(condition, values)
        case And(conditions):
            return all(holds(condition, values) for condition in conditions)
        case Or(conditions):
            return any(holds(condition, values) for condition in conditions)
        case IsNull(column):
            return values.get(column) is None
    value = values.get(node.column)
    if value is None:
        return False
    match node:
        case Compare(_, comparator, other):
            return bool(COMPARE[comparator](value, other))
        case Contains(_, text):
            return text.lower() in value.lower()
        case Matches(_, pattern):
            return re.search(pattern, value) is not None
        case IsIn(_, others):
            return value in others


PIECES = ["a", "B", "ab", "é", "É", "日", "😀", "<b>", ".", " ", '"', "\n"]
WORDS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
NUMBERS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
NUMBER_COLUMNS = st.sampled_from(["reward", "rewards/math", "length", "step", "advantage"])
TEXT_COLUMNS = st.sampled_from(["text", "prompt", "end", "kind", "error"])
LEAVES = st.one_of(
    st.builds(Compare, NUMBER_COLUMNS, st.sampled_from(list(COMPARE)), NUMBERS),
    st.builds(Compare, TEXT_COLUMNS, st.sampled_from(["==", "!="]), WORDS | st.sampled_from(["step", "length"])),
    st.builds(Contains, TEXT_COLUMNS, WORDS),
    st.builds(Matches, TEXT_COLUMNS, st.sampled_from(["a+b?", "^B", "(?i)b", "[^a]a", "", "<.>", "x|😀"])),
    st.builds(IsIn, NUMBER_COLUMNS, st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)),
    st.builds(IsIn, TEXT_COLUMNS, st.lists(st.sampled_from(["answer", "length", "eval", "a"]), min_size=1).map(tuple)),
    st.builds(IsNull, st.one_of(NUMBER_COLUMNS, TEXT_COLUMNS)),
)
TREES = st.recursive(
    LEAVES,
    lambda nodes: st.one_of(
        st.builds(Not, nodes),
        st.builds(And, st.lists(nodes, min_size=2, max_size=3).map(tuple)),
        st.builds(Or, st.lists(nodes, min_size=2, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)
ROW = st.builds(
    row,
    text=WORDS,
    prompt=WORDS,
    length=st.none() | st.integers(0, 3),
    reward=st.none() | NUMBERS | st.just(float("nan")),
    advantage=NUMBERS,
    finish_reason=st.sampled_from(["stop", "length", None]),
    **{"rewards/math": st.none() | NUMBERS},
)
ROWS = st.lists(ROW, min_size=1, max_size=7)
TURNS = st.fixed_dictionaries({"end": st.sampled_from(["timeout", "length", None]), "error": st.none() | WORDS})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=TREES,
    step=ROWS,
    replaced=st.lists(st.builds(dict.__or__, ROW, TURNS), min_size=1, max_size=4),
    is_older=st.booleans(),
)
def test_results_equal_evaluation_row_by_row(
    tmp_path: Path, tree: Node, step: list[Row], replaced: list[Row], is_older: bool
):
    write(tmp_path, "step-000002", step, row_group_size=2, is_older=is_older)
    write(tmp_path, "replaced-000002", replaced, row_group_size=3, is_older=is_older)
    expected = []
    for kind, rows in (("step", step), ("replaced", replaced)):
        for i, one in enumerate(rows):
            end = one["end"] if "end" in one else {"stop": "answer", "length": "length"}.get(one["finish_reason"])
            if holds(tree, {**one, "end": end, "step": 2.0, "kind": kind}):
                expected.append((kind, 2, i))
    assert found(tmp_path, to_text(tree)) == expected


def test_newest_step_first_and_training_before_evaluation(tmp_path: Path):
    for name in ("step-000009", "step-000010", "eval-000010", "replaced-000010", "eval-000000"):
        write(tmp_path, name, [row(text="yes"), row(text="no"), row(text="yes")])
    order = [("step", 10), ("replaced", 10), ("eval", 10), ("step", 9), ("eval", 0)]
    assert found(tmp_path, "yes") == [(*file, i) for file in order for i in (0, 2)]
    assert found(tmp_path, "yes", limit=3) == [("step", 10, 0), ("step", 10, 2), ("replaced", 10, 0)]
    assert done(tmp_path, "yes", limit=3).reason == "limit"
    assert done(tmp_path, "yes", limit=10).reason == "limit"
    assert done(tmp_path, "yes").reason == "end"
    assert found(tmp_path, "kind == eval and step > 0 and yes") == [("eval", 10, 0), ("eval", 10, 2)]


@pytest.mark.parametrize("is_older", [False, True])
def test_matches_name_their_group(tmp_path: Path, is_older: bool):
    rows = [row(prompt_id=i // 2, text=f"<{i}>") for i in range(8)]
    write(tmp_path, "step-000001", rows, row_group_size=3, is_older=is_older)
    assert [(m.row, m.group) for m in matches_of(tmp_path, "text ~ '<[2567]>'")] == [(2, 1), (5, 2), (6, 3), (7, 3)]


@pytest.mark.parametrize(
    ("query", "text", "shown", "spans"),
    [
        ("ab", "xAB😀ab", "xAB😀ab", [(1, 3), (4, 6)]),
        ('text ~ "^a"', "aaa", "aaa", [(0, 1)]),
        ('text ~ "(?P<x>b)|(c)" a', "😀abc", "😀abc", [(1, 2), (2, 3), (3, 4)]),
        ("not zz", "abc", "abc", []),
        ('"<script>"', "é<script>alert(1)</script>", "é<script>alert(1)</script>", [(1, 9)]),
        ("needle", "-" * 500 + "needle" + "-" * 500, "…" + "-" * 80 + "needle" + "-" * 194 + "…", [(81, 87)]),
        ("needle", "line\n" * 50 + "a needle", "…line\nline\na needle", [(13, 19)]),
        ("reward == 0", "-" * 500, "-" * 280 + "…", []),
        ("needle", "日" * 300_000 + "needle", "…" + "日" * 80 + "needle", [(81, 87)]),
    ],
    ids=["emoji", "anchor", "groups", "nothing", "html", "window", "lines", "beginning", "large"],
)
def test_snippets_show_where_it_matches(
    tmp_path: Path, query: str, text: str, shown: str, spans: Sequence[tuple[int, int]]
):
    write(tmp_path, "step-000001", [row(text=text)])
    (match,) = matches_of(tmp_path, query)
    assert (match.column, match.text, list(match.spans)) == ("text", shown, spans)


def test_patterns_too_large_together_are_not_joined():
    one, other = Matches("text", "b|\\pL{400}"), Matches("text", "c|\\pL{400}")
    assert positive_patterns(And((one, other))) == {"text": one.pattern}
    assert positive_patterns(Or((one, Not(other), Contains("prompt", "a")))) == {
        "text": "(?:b|\\pL{400})",
        "prompt": "(?:(?i:a))",
    }


def test_snippet_of_another_column(tmp_path: Path):
    write(tmp_path, "step-000001", [row(text="4", prompt="2+2?", messages='[{"content": "caf\\u00e9 \\"x\\""}]')])
    for query, column, part in (
        ("prompt contains '2+2'", "prompt", "2+2"),
        ("messages contains 'café \"x'", "messages", 'caf\\u00e9 \\"x'),
        ("prompt contains zz or reward == 0", "text", ""),
    ):
        (match,) = matches_of(tmp_path, query)
        assert (match.column, "".join(match.text[a:b] for a, b in match.spans)) == (column, part)


def test_unreadable_files_are_reported_and_skipped(tmp_path: Path):
    for step in range(1, 5):
        write(tmp_path, f"step-{step:06d}", [row(text="yes")] * 5)
    folder = tmp_path / "completions"
    whole = (folder / "step-000003.parquet").read_bytes()
    (folder / "step-000003.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "step-000002.parquet").write_bytes(b"")
    middle = bytearray((folder / "step-000004.parquet").read_bytes())
    middle[4:200] = bytes(196)
    (folder / "step-000004.parquet").write_bytes(middle)
    (folder / "step-000005.parquet").mkdir()
    (folder / "notes.txt").write_text("not a completions file")
    assert {step for _, step, _ in found(tmp_path, "yes")} == {1}
    problems = done(tmp_path, "yes").problems
    assert [re.search(r"step-(\d+)", problem)[1] for problem in problems] == ["000005", "000004", "000003", "000002"]
    assert problems[2] == "completions/step-000003.parquet is truncated."
    assert problems[3] == "completions/step-000002.parquet is empty."


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    write(run, "step-000001", [row(text="yes")])
    secret = write(other, "step-000002", [row(text="yes", **{"rewards/secret": 1.0})])
    (run / "completions" / "step-000002.parquet").symlink_to(secret)
    (run / "completions" / "step-000003.parquet").symlink_to(run / "completions" / "step-000001.parquet")
    assert found(run, "yes") == [("step", 3, 0), ("step", 1, 0)]
    assert "leads outside" in done(run, "yes").problems[0]
    assert "rewards/secret" not in [column.name for column in columns(ViewedRun(run, "run")).columns]
    (other / "run").mkdir()
    (other / "run" / "completions").symlink_to(run / "completions")
    assert found(other / "run", "yes") == []


def test_columns_of_other_types_are_a_problem_of_their_file(tmp_path: Path):
    write(tmp_path, "step-000001", [row(reward=1)])
    write(tmp_path, "step-000002", [row(reward="high")])
    assert found(tmp_path, "reward > 0") == [("step", 1, 0)]
    assert "step-000002.parquet cannot be searched" in done(tmp_path, "reward > 0").problems[0]


def test_files_may_vanish_and_appear(tmp_path: Path):
    files = [write(tmp_path, f"step-{step:06d}", [row(text="yes")] * 2) for step in (1, 2, 3)]
    running = search(ViewedRun(tmp_path, "run"), "yes", 100, lambda: False)
    assert isinstance(next(running), Progress)
    assert isinstance(next(running), Match)
    files[2].unlink()
    files[1].unlink()
    write(tmp_path, "step-000004", [row(text="yes")])
    rest = list(running)
    assert [event.step for event in rest if isinstance(event, Match)] == [3, 1, 1]
    assert rest[-1].problems == ()


def test_cancelled_between_row_groups(tmp_path: Path):
    write(tmp_path, "step-000001", [row(text="yes")] * 6, row_group_size=2)
    answers: Iterator[bool] = iter([False, True])
    seen = list(search(ViewedRun(tmp_path, "run"), "yes", 100, lambda: next(answers)))
    assert [event.row for event in seen if isinstance(event, Match)] == [0, 1]
    assert seen[-1].reason == "cancelled"


def test_huge_completions_are_not_held_together(tmp_path: Path):
    texts = ["é" * 2_000_000 + f"<{i}>" for i in range(12)]  # 48 MB
    (tmp_path / "completions").mkdir()
    file = tmp_path / "completions" / "step-000001.parquet"
    pq.write_table(pa.table({"completion": texts}), file, use_dictionary=False, write_batch_size=1)
    run = ViewedRun(tmp_path, "run")
    before = pa.total_allocated_bytes()
    most = 0
    for event in search(run, 'text ~ "<[67]>"', 100, lambda: False):
        most = max(most, pa.total_allocated_bytes() - before)
        if isinstance(event, Match):
            assert event.text[slice(*event.spans[0])] in ("<6>", "<7>")
            assert len(event.text) < 300
    assert event.matches == 2
    assert most < 30e6
    answers = iter([False, False, True])  # within the row group, too
    assert [event.reason for event in search(run, "zz", 1, lambda: next(answers)) if isinstance(event, Done)] == [
        "cancelled"
    ]


def test_queries_use_the_columns_of_the_run(tmp_path: Path):
    write(tmp_path, "step-000001", [row(**{"rewards/math": 1.0})])
    write(tmp_path, "step-000002", [row(**{"environment/score": 1.0})])
    assert found(tmp_path, "rewards.math == 1") == [("step", 1, 0)]
    assert found(tmp_path, "rewards.math is null") == [("step", 2, 0)]
    names = [column.name for column in columns(ViewedRun(tmp_path, "run")).columns]
    assert names[-2:] == ["environment/score", "rewards/math"]
    with pytest.raises(QuerySyntaxError, match="did you mean rewards/math"):
        search(ViewedRun(tmp_path, "run"), parse("rewards.mth == 1"), 10, lambda: False)


def test_a_run_without_completions_finds_nothing(tmp_path: Path):
    assert done(tmp_path, "yes") == Done(reason="end", files_done=0, files_total=0, matches=0, problems=())


def test_statistics_and_names_decide_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rewards = (0.0, 0.5, 2.0, 2.5, None, None)
    write(tmp_path, "step-000001", [row(reward=reward, text="yes") for reward in rewards], row_group_size=2)
    read: list[tuple[int, str]] = []
    original = pq.ParquetFile.read_row_group

    def recorded(file: pq.ParquetFile, i: int, *, columns: list[str], use_threads: bool) -> pa.Table:
        read.append((i, *columns))
        return original(file, i, columns=columns, use_threads=use_threads)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", recorded)
    assert found(tmp_path, "yes and reward > 2.2 and step == 1") == [("step", 1, 3)]
    assert set(read[:2]) == {(1, "reward"), (1, "completion")}
    assert {i for i, *_ in read} == {1}
    for query, row_found in (("reward <= 0", 0), ("reward >= 2.5", 3), ("reward == 2", 2), ("reward in (0.5, 9)", 1)):
        assert found(tmp_path, query) == [("step", 1, row_found)]
    read.clear()
    assert found(tmp_path, "yes and step == 2") == []
    assert found(tmp_path, "step == 2 or kind == eval") == []
    assert read == []
    assert len(found(tmp_path, "step == 1 and kind == step")) == len(rewards)
