"""Whatever a completions file holds, the page's readers answer, and say in one sentence what cannot be read."""

import errno
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import groups, questions, tools
from cohort_view.completions import FileCache
from cohort_view.run import steps_around
from cohort_view.search.search import Search, search
from cohort_view.tokens import completion
from completions_files import RunFolder, a_row, answering, write_rows
from selection import examples, slow

ROWS = [a_row(i // 4, float(i % 2), length=30, completion="some text " * 20) for i in range(40)]
NAME = "completions/step-000005.parquet"
step, group = answering(groups.step), answering(groups.group)


def read_all(run_path, kind="step"):
    """Call every reader, and return their answers: the first three are of one step."""
    run = RunFolder(run_path)
    calls = [
        *((groups.step, 5, kind, sort) for sort in groups.SORTS),
        (groups.group, 5, kind, 2),
        (completion, 5, kind, 9),
        (questions.questions, "eval" if kind == "eval" else "step"),
        (questions.question, "eval" if kind == "eval" else "step", 1),
        (tools.tools,),
    ]
    found = list(search(run, Search(text="text"), lambda: False))
    return [*(answering(function)(run, *arguments) for function, *arguments in calls), answering(lambda: found[-1])()]


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "Parquet file size is 0 bytes"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-9]),
            "Parquet magic bytes not found in footer",
        ),
        (lambda path: path.write_bytes(b"<script>alert(1)</script>"), "Parquet magic bytes not found"),
        (make_pipe, "not a regular file."),
        (make_folder, "not a regular file."),
    ],
    ids=["empty", "cut", "other", "pipe", "folder"],
)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, damage, reason):
    damage(write_rows(tmp_path, ROWS))
    *answers, of_question, of_tools, of_search = read_all(tmp_path)
    for answer in (*answers, of_tools):
        assert [problem.startswith(f"{NAME} cannot be read: {reason}") for problem in answer["problems"]] == [True]
    assert of_question["problems"] == [*answers[-1]["problems"], "No completions of question 1."]
    assert [problem.startswith(f"{NAME} cannot be searched: ") for problem in of_search["problems"]] == [True]


@pytest.mark.parametrize(
    ("kind", "every", "reason"),
    [
        (
            "step",
            1,
            "No completions of step 5: the step is not done, its file is still being written, or it was deleted.",
        ),
        ("step", 2, "No completions of step 5: only those of every 2 steps are kept (run.completions_every: 2)."),
        ("replaced", 0, "No completions of step 5: none are kept (run.completions_every: 0)."),
        ("dropped", 5, "No groups of step 5 were dropped."),
        ("eval", 2, "No evaluation completions after step 5."),
    ],
)
def test_why_there_are_no_completions(tmp_path, kind, every, reason):
    run = RunFolder(tmp_path, {"run": {"completions_every": every}})
    assert step(run, 5, kind).problems == group(run, 5, kind, 0).problems == [reason]


def test_links_out_of_the_run_folder_are_not_followed(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    path = write_rows(other, ROWS)
    (run / "completions").mkdir(parents=True)
    (run / NAME).symlink_to(path)
    for answer in read_all(run)[:-3]:
        assert answer["problems"] == [f"{NAME} cannot be read: a link that leads outside of the run folder."]
    (run / NAME).unlink()
    (run / "completions").rmdir()
    (run / "completions").symlink_to(path.parent)
    assert steps_around(run)["steps"] == []


@pytest.mark.parametrize("missing", ["group", "num_tokens", "end", "prompt_is_chat", "prompt_id", "completion"])
def test_a_file_of_a_version_that_lacked_a_column_is_one_sentence(tmp_path, missing):
    write_rows(tmp_path, [{k: v for k, v in row.items() if k != missing} for row in ROWS])
    for answer in read_all(tmp_path)[:8]:
        assert answer["problems"] == [f"{NAME} cannot be read: it has no column '{missing}'."]


@pytest.mark.parametrize(
    ("column", "value"), [("answer", 42), ("messages", [1]), ("error", 1.5), ("prompt", 3), ("details/x", {"a": 1})]
)
def test_a_column_of_another_type_is_one_sentence(tmp_path, column, value):
    write_rows(tmp_path, [row | {column: value} for row in ROWS])
    *answers, of_question, of_tools, _ = read_all(tmp_path)
    for answer in (*answers, of_tools):
        assert answer["problems"] == [f"{NAME} cannot be read: its column {column!r} holds no text."]
    assert of_question["problems"][0] == of_tools["problems"][0]


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    write_rows(tmp_path, ROWS)
    real = os.stat

    def stat(path, **options):
        if "completions/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert step(RunFolder(tmp_path), 5).problems == [f"{NAME} cannot be read: Permission denied."]


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
        '[{"role": "tool", "content": [[' + "[" * 3000,
        "NaN",
        "\ufeff",
    ]
    rows = [
        a_row(rng.randrange(3), rng.choice([None, 0.0, float("nan"), float("inf"), -1e308]), length=rng.randrange(4))
        | {"prompt": rng.choice(texts), "completion": rng.choice(texts), "messages": rng.choice([None, *texts])}
        | {"prompt_is_chat": rng.choice([True, False])}
        | {"details/x": rng.choice(texts), "policy_version": rng.choice([None, 0, -5, 2**52])}
        for _ in range(rng.randrange(1, 12))
    ]
    file = write_rows(path, rows, kind=rng.choice(["step", "eval"]), row_group_size=rng.randrange(1, 5))
    content = file.read_bytes()
    for length in (len(content), rng.randrange(len(content))):
        file.write_bytes(content[:length])
        for kind in ("step", "eval"):
            read_all(path, kind)


@slow("files in which single bytes are wrong")
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
    cache: FileCache[int] = FileCache(2)
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.touch()
    for value, file in enumerate(files, 1):
        assert cache.get(file, lambda value=value: value) == value
        assert cache.get(files[0], lambda: 99) == 1
    assert [cache.peek(file) for file in files] == [1, None, 3]
    files[0].write_text("changed")
    assert (cache.peek(files[0]), cache.get(files[0], lambda: 4)) == (None, 4)


def test_a_file_that_is_replaced_is_read_again(tmp_path):
    write_rows(tmp_path, ROWS[:4])
    run = RunFolder(tmp_path)
    assert step(run, 5).num_groups == 1
    write_rows(tmp_path, ROWS[:8])
    assert step(run, 5).num_groups == 2
