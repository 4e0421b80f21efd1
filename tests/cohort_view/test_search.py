"""Search over a run's completions files: what it finds, in which order, and what damaged or large files do to it."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cohort import fast_json
from cohort.config.condition import ConditionError
from cohort_view.run import ViewedRun
from cohort_view.search.search import Done, Match, Progress, Search, columns, search, snippet

Row = dict[str, Any]


def row(**values: Any) -> Row:
    """A completion as a test states it."""
    columns = {"prompt_is_chat": False, "group": 0, "prompt_id": 0, "prompt": "1+1?", "text": "", "num_tokens": 1}
    return columns | {"reward": 0.0, "end": "answer"} | values


def write(folder: Path, name: str, rows: Sequence[Row], *, row_group_size: int = 100) -> Path:
    """Write a completions file of a run folder."""
    table = {{"text": "completion"}.get(key, key): [r[key] for r in rows] for key in rows[0]}
    file = folder / "completions" / f"{name}.parquet"
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table), file, row_group_size=row_group_size)
    return file


def events_of(folder: Path, text: str, where: str = "", **wanted: Any) -> list[Match | Progress | Done]:
    return list(search(ViewedRun(folder, "run"), Search(text=text, where=where, **wanted), lambda: False))


def matches_of(folder: Path, text: str, where: str = "", **wanted: Any) -> list[Match]:
    return [event for event in events_of(folder, text, where, **wanted) if isinstance(event, Match)]


def found(folder: Path, text: str, where: str = "", **wanted: Any) -> list[tuple[str, int, int]]:
    """Kind, step and row of each match, in order."""
    return [(match.kind, match.step, match.row) for match in matches_of(folder, text, where, **wanted)]


def done(folder: Path, text: str, where: str = "", **wanted: Any) -> Done:
    last = events_of(folder, text, where, **wanted)[-1]
    assert isinstance(last, Done)
    return last


def test_newest_step_first_and_training_before_evaluation(tmp_path: Path):
    for name in ("step-000009", "step-000010", "eval-000010", "replaced-000010", "eval-000000"):
        write(tmp_path, name, [row(text="yes"), row(text="no"), row(text="yes")])
    order = [("step", 10), ("replaced", 10), ("eval", 10), ("step", 9), ("eval", 0)]
    assert found(tmp_path, "yes") == [(*file, i) for file in order for i in (0, 2)]
    assert found(tmp_path, "yes", limit=3) == [("step", 10, 0), ("step", 10, 2), ("replaced", 10, 0)]
    assert found(tmp_path, "yes", step=10, kind="eval") == found(tmp_path, "yes", "step == 10 and kind == 'eval'")
    for limit in (0, 3, 100):  # all are counted
        last = done(tmp_path, "yes", limit=limit)
        assert (last.reason, last.matches, last.by_step) == ("end", 10, {10: 6, 9: 2, 0: 2})
    assert done(tmp_path, "yes", step=9).files_total == 1
    assert found(tmp_path, "yes", "kind == 'eval' and step > 0") == [("eval", 10, 0), ("eval", 10, 2)]


def test_a_match_shows_where_its_row_is_in_the_file_and_what_it_is(tmp_path: Path):
    chat = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}])
    rows = [
        row(
            text=f"<{i}>",
            num_tokens=i,
            reward=None if i == 6 else i / 2,
            group=i // 4,
            prompt=chat,
            prompt_is_chat=True,
        )
        for i in range(8)
    ]
    write(tmp_path, "step-000001", rows, row_group_size=3)
    for i, match in zip((2, 6), matches_of(tmp_path, "", "matches(text, '<[26]>')"), strict=True):
        reward = None if i == 6 else 1.0
        parts = ["", f"<{i}>", ""]
        assert match == Match(
            step=1,
            kind="step",
            row=i,
            group=i // 4,
            prompt="Hello?",
            reward=reward,
            column="text",
            parts=parts,
        )


@pytest.mark.parametrize(
    ("pattern", "text", "parts"),
    [
        ("(?i:ab)", "xAB😀ab", ["x", "AB", "😀", "ab", ""]),
        ("^a", "aaa", ["", "a", "aa"]),
        ("(?P<x>b)|(c)|a", "😀abc", ["😀", "a", "", "b", "", "c", ""]),
        ("zz", "abc", ["abc"]),
        ("<script>", "é<script>alert(1)</script>", ["é", "<script>", "alert(1)</script>"]),
        ("needle", "-" * 500 + "needle" + "-" * 500, ["…" + "-" * 80, "needle", "-" * 192 + "…"]),
        ("needle", "line\n" * 50 + "a needle", ["…line\nline\na ", "needle", ""]),
        (None, "-" * 500, ["-" * 280 + "…"]),
        ("needle", "日" * 300_000 + "needle", ["…" + "日" * 80, "needle", ""]),
        ("a+", "a" * 500, ["", "a" * 279 + "…"]),
    ],
    ids=["emoji", "anchor", "groups", "nothing", "html", "window", "lines", "beginning", "large", "long"],
)
def test_snippets_show_where_it_matches(pattern: str | None, text: str, parts: list[str]):
    assert snippet(text, pattern) == parts


@pytest.mark.parametrize("encode", [json.dumps, lambda value: fast_json.encode(value).decode()], ids=["ascii", "utf-8"])
def test_text_is_found_however_json_escapes_it(tmp_path: Path, encode: Callable[[Any], str]):
    texts = ['café "x"', "C:\\é", "ü\n日", "tab\té", "😀 'it'", "plain"]
    write(tmp_path, "step-000001", [row(text="", messages=encode([{"content": text}])) for text in texts])
    for text in texts:
        assert len(matches_of(tmp_path, "", f"{text!r} in messages")) == 1


def test_the_column_that_a_condition_reads_is_shown(tmp_path: Path):
    write(tmp_path, "step-000001", [row(text="4", prompt="2+2?", messages='[{"content": "caf\\u00e9 \\"x\\""}]')])
    for text, where, column, parts in (
        ("", "'2+2' in prompt", "prompt", ["", "2+2", "?"]),
        ("4", "'2+2' in prompt", "text", ["", "4", ""]),
        ("", "'café \"x' in messages", "messages", ['[{"content": "', 'caf\\u00e9 \\"x', '\\""}]']),
        ("", "'zz' in prompt or reward == 0", "text", ["4"]),
        ("", "'zz' not in prompt", "text", ["4"]),
        ("", "'2' in prompt and matches(prompt, '[?]')", "prompt", ["", "2", "+", "2", "", "?", ""]),
    ):
        (match,) = matches_of(tmp_path, text, where)
        assert (match.column, match.parts) == (column, parts)


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
    os.mkfifo(folder / "step-000006.parquet")
    (folder / "notes.txt").write_text("not a completions file")
    assert {step for _, step, _ in found(tmp_path, "yes")} == {1}
    problems = done(tmp_path, "yes").problems
    assert [re.search(r"step-(\d+)", problem)[1] for problem in problems] == [f"00000{i}" for i in (6, 5, 4, 3, 2)]
    assert problems[0] == "completions/step-000006.parquet cannot be searched: not a regular file."
    assert problems[4] == "completions/step-000002.parquet cannot be searched: Parquet file size is 0 bytes."


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
    assert "rewards/secret" not in [column.name for column in columns(ViewedRun(run, "run"))]
    (other / "run").mkdir()
    (other / "run" / "completions").symlink_to(run / "completions")
    assert found(other / "run", "yes") == []


def test_columns_of_other_types_are_a_problem_of_their_file(tmp_path: Path):
    write(tmp_path, "step-000001", [row(reward=1)])
    write(tmp_path, "step-000002", [row(reward="high")])
    assert found(tmp_path, "", "reward > 0") == [("step", 1, 0)]
    assert "step-000002.parquet cannot be searched" in done(tmp_path, "", "reward > 0").problems[0]


def test_files_may_vanish_and_appear(tmp_path: Path):
    files = [write(tmp_path, f"step-{step:06d}", [row(text="yes")] * 2) for step in (1, 2, 3)]
    running = search(ViewedRun(tmp_path, "run"), Search(text="yes"), lambda: False)
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
    seen: list[Match | Progress | Done] = []
    for event in search(ViewedRun(tmp_path, "run"), Search(text="yes"), lambda: len(seen) > 1):
        seen.append(event)
    assert [event.row for event in seen if isinstance(event, Match)] == [0, 1]
    assert seen[-1].reason == "cancelled"


def test_one_row_group_is_held_at_a_time(tmp_path: Path):
    texts = ["é" * 2_000_000 + f"<{i}>" for i in range(12)]  # 48 MB
    (tmp_path / "completions").mkdir()
    file = tmp_path / "completions" / "step-000001.parquet"
    pq.write_table(pa.table({"completion": texts}), file, use_dictionary=False, row_group_size=1)
    before = pa.total_allocated_bytes()
    most = 0
    for event in search(ViewedRun(tmp_path, "run"), Search(where='matches(text, "<[67]>")'), lambda: False):
        most = max(most, pa.total_allocated_bytes() - before)
        if isinstance(event, Match):
            assert event.parts[1] in ("<6>", "<7>")
            assert len("".join(event.parts)) < 300
    assert event.matches == 2
    assert most < 30e6


def test_conditions_use_the_columns_of_the_run(tmp_path: Path):
    write(tmp_path, "step-000001", [row(**{"rewards/math": 1.0})])
    write(tmp_path, "step-000002", [row(**{"environment/score": 1.0})])
    assert found(tmp_path, "", "rewards/math == 1") == [("step", 1, 0)]
    assert found(tmp_path, "", "rewards/math is None") == [("step", 2, 0)]
    names = [column.name for column in columns(ViewedRun(tmp_path, "run"))]
    assert names[-2:] == ["environment/score", "rewards/math"]
    with pytest.raises(ConditionError, match="did you mean rewards/math"):
        events_of(tmp_path, "", "rewards.mth == 1")


def test_a_run_without_completions_finds_nothing(tmp_path: Path):
    assert done(tmp_path, "yes") == Done(files_total=0, reason="end")


def test_names_and_statistics_decide_without_reading(tmp_path: Path):
    rewards = (0.0, 0.5, 2.0, 2.5, None, None)
    file = write(tmp_path, "step-000001", [row(reward=reward, text="yes") for reward in rewards], row_group_size=2)
    column = pq.read_metadata(file).row_group(1).column(0)
    second = column.dictionary_page_offset or column.data_page_offset
    data = file.read_bytes()
    file.write_bytes(data[:4] + bytes(second - 4) + data[second:])  # the first row group cannot be read
    (file.parent / "step-000002.parquet").write_bytes(b"")
    for where, rows in (
        ("reward > 2.2", [3]),
        ("reward == 2", [2]),
        ("reward in (2.5, 9) and kind == 'step'", [3]),
        ("1.5 < reward", [2, 3]),
        ("reward > 9 or length < 0 and reward > 1", []),
    ):
        assert found(tmp_path, "yes", f"step < 2 and ({where})") == [("step", 1, i) for i in rows]
        assert done(tmp_path, "yes", f"step < 2 and ({where})").problems == ()
    assert done(tmp_path, "yes", "kind == 'eval' or step == 3").problems == ()
    assert len(done(tmp_path, "yes").problems) == 2
