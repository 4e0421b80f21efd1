"""Whatever a completions file holds, the page's readers answer with what can be read and say what cannot."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import groups
from cohort_view.completions import FileCache
from cohort_view.evaluations import evaluations
from cohort_view.records import to_json
from cohort_view.tokens import completion
from completions_files import RunFolder, a_row, as_written_before, write_columns, write_rows
from selection import examples, slow

ROWS = [a_row(i // 4, float(i % 2), length=30, completion="some text " * 20) for i in range(40)]


def read_all(run_path, kind="step"):
    """Call every reader, and return their answers as JSON."""
    run = RunFolder(run_path, {"rollout": {"num_generations": 4}})
    answers = [
        groups.steps(run),
        *(groups.step(run, 5, kind=kind, sort=sort) for sort in groups.SORTS),
        groups.group(run, 5, kind, 2),
        groups.diff(run, 5, kind, 0, 9),
        completion(run, 5, kind, 9),
        evaluations(run),
    ]
    return [json.loads(to_json(answer)) for answer in answers]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, ""),
        (b"", "completions/step-000005.parquet is empty."),
        (b"PAR1" + b"x" * 50, "completions/step-000005.parquet is truncated."),
        (b"<script>alert(1)</script>", "completions/step-000005.parquet is damaged: "),
    ],
)
def test_files_that_are_none(tmp_path, content, problem):
    path = write_rows(tmp_path, ROWS)
    path.unlink() if content is None else path.write_bytes(content)
    for answer in read_all(tmp_path)[1:-1]:
        assert answer["problems"][0].startswith(problem)


@pytest.mark.parametrize(
    ("kind", "every", "reason"),
    [
        ("step", 1, "No completions of step 5: the step is not done, or the file was deleted."),
        ("step", 2, "No completions of step 5: only those of every 2 steps are kept (run.completions_every: 2)."),
        ("replaced", 0, "No completions of step 5: none are kept (run.completions_every: 0)."),
        ("dropped", 5, "No groups of step 5 were dropped."),
        ("eval", 2, "No completions of an evaluation after step 5."),
    ],
)
def test_why_there_are_no_completions(tmp_path, kind, every, reason):
    run = RunFolder(tmp_path, {"run": {"completions_every": every}})
    assert groups.step(run, 5, kind).problems == (reason,)
    assert groups.group(run, 5, kind, 0).problems == [reason]


def test_a_folder_in_place_of_a_file(tmp_path):
    write_rows(tmp_path, ROWS).unlink()
    (tmp_path / "completions/step-000005.parquet").mkdir()
    assert all(answer["problems"] for answer in read_all(tmp_path)[1:-1])


def test_links_out_of_the_run_folder_are_not_followed(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    path = write_rows(other, ROWS)
    (run / "completions").mkdir(parents=True)
    (run / "completions/step-000005.parquet").symlink_to(path)
    for answer in read_all(run)[1:-1]:
        assert answer["problems"][0].endswith("cannot be read: a link that leads outside of the run folder.")
    (run / "completions/step-000005.parquet").unlink()
    (run / "completions").rmdir()
    (run / "completions").symlink_to(path.parent)
    assert groups.steps(RunFolder(run)).steps == ()


@pytest.mark.parametrize("missing", list(ROWS[0]))
@pytest.mark.parametrize("rows", [ROWS, [as_written_before(row) for row in ROWS]], ids=["now", "before"])
def test_a_column_is_missing(tmp_path, rows, missing):
    for kind in ("step", "eval"):
        write_rows(tmp_path, [{k: v for k, v in row.items() if k != missing} for row in rows], kind=kind)
        assert len(read_all(tmp_path, kind)) == 11


def test_columns_of_other_types(tmp_path):
    columns = {name: pa.array([row[name] for row in ROWS]) for name in ROWS[0]}
    columns |= {
        "prompt_id": pa.array([f"q-{i // 4}" for i in range(40)]),
        "reward": pa.array(["0.5", "nan", "much", None] * 10),
        "completion": pa.array([b"\xff\xfe <b>"] * 40, pa.binary()),
        "sampling_logprobs": pa.array([-0.5] * 40),
        "advantage": pa.array([float("inf"), float("nan")] * 20),
        "finish_reason": pa.array([1] * 40),
        "prompt": pa.nulls(40),
        "completion_token_ids": pa.array([[2**40] * 3] * 40),
    }
    write_columns(tmp_path, columns)
    step = groups.step(RunFolder(tmp_path, {"rollout": {"num_generations": 4}}), 5)
    assert (step.num_groups, step.groups[1].prompt_id, step.groups[0].rows[0].reward) == (10, "q-1", 0.5)
    assert step.groups[0].rows[0].text == "\ufffd\ufffd <b>"
    assert read_all(tmp_path)[1]["groups"][0]["rows"][0]["advantage"] is None
    write_columns(tmp_path, columns, kind="eval")
    assert "left out" in read_all(tmp_path)[-1]["problems"][0]


def test_texts_that_are_not_utf8(tmp_path):
    texts = pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"a\xff", b"\xf0\x9d"], pa.binary()).buffers()[1:]])
    columns = {name: pa.array([row[name] for row in ROWS[:2]]) for name in ROWS[0]} | {
        "completion": texts,
        "prompt": texts,
    }
    write_columns(tmp_path, columns)
    run = RunFolder(tmp_path)
    assert [c.text for c in groups.group(run, 5, "step", 0).completions] == ["a\ufffd", "\ufffd"]
    assert groups.step(run, 5).groups[0].prompt == "a\ufffd"
    assert completion(run, 5, "step", 1).text == "\ufffd"


def test_a_damaged_column_leaves_the_others(tmp_path):
    import pyarrow.parquet as pq

    path = write_rows(tmp_path, ROWS, row_group_size=20)
    metadata = pq.ParquetFile(path).metadata.row_group(0)
    column = next(metadata.column(i) for i in range(99) if metadata.column(i).path_in_schema == "completion")
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    run = RunFolder(tmp_path, {"rollout": {"num_generations": 4}})
    step = groups.step(run, 5)
    assert "column 'completion' cannot be read" in step.problems[0]
    assert [row.text[:4] for group in step.groups[4:6] for row in group.rows] == [""] * 4 + ["some"] * 4
    assert [row.reward for row in step.groups[0].rows] == [0, 1, 0, 1]
    assert groups.group(run, 5, "step", 0).completions[0].text == ""
    assert completion(run, 5, "step", 0).sequences[0].tokens.ids == list(range(10, 40))


@given(st.integers(0, 2**32))
@examples(100, quick=8)
def test_any_truncation_and_any_text_is_answered(tmp_path_factory, seed):
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("run")
    texts = [
        "<script>alert(1)</script>",
        "𝟙" * rng.randrange(50),
        "\x00\u202e",
        "[[[",
        '[{"role": 3}]',
        "NaN",
        "\ufeff",
    ]
    rows = [
        a_row(rng.randrange(3), rng.choice([None, 0.0, float("nan"), float("inf"), -1e308]), length=rng.randrange(4))
        | {"prompt": rng.choice(texts), "completion": rng.choice(texts), "messages": rng.choice([None, *texts])}
        | {"details/x": rng.choice(texts), "policy_version": rng.choice([None, 0, -5, 2**62])}
        for _ in range(rng.randrange(1, 12))
    ]
    file = write_rows(path, rows, kind=rng.choice(["step", "eval"]), row_group_size=rng.randrange(1, 5))
    for kind in ("step", "eval"):
        read_all(path, kind)
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])
    for kind in ("step", "eval"):
        read_all(path, kind)


@slow("files that are cut short, and a column of which every byte is wrong")
@given(st.integers(0, 2**32))
@examples(300)
def test_random_damage_is_answered(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("run")
    file = write_rows(path, ROWS, row_group_size=10)
    content = bytearray(file.read_bytes())
    for place in rng.integers(4, len(content) - 8, rng.integers(1, 20)):
        content[place] = rng.integers(256)
    file.write_bytes(content)
    read_all(path)


def test_the_cache_keeps_what_was_used_last(tmp_path):
    cache: FileCache[int] = FileCache(10, lambda value: value)
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.touch()
    for file, value in zip(files, (4, 5, 3), strict=True):
        assert cache.get(file, lambda value=value: value) == value
        assert cache.get(files[0], lambda: 4) == 4
    assert [cache.peek(file) for file in files] == [4, None, 3]
    files[0].write_text("changed")
    assert (cache.peek(files[0]), cache.get(files[0], lambda: 99)) == (None, 99)  # kept alone, though too heavy
    assert [cache.peek(file) for file in files] == [99, None, None]


def test_a_file_that_is_replaced_is_read_again(tmp_path):
    write_rows(tmp_path, ROWS[:4])
    run = RunFolder(tmp_path)
    assert groups.step(run, 5).num_groups == 1
    write_rows(tmp_path, ROWS[:8])
    assert groups.step(run, 5).num_groups == 2
