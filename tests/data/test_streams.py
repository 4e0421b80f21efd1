"""Streams of rows: their order, and that a run goes on exactly where it was."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config.objects import name_rows
from cohort.data import RowStream, StreamedPrompts, first_rows, numbered_rows, open_stream
from cohort.errors import TrainingError, UserError
from cohort.records import Prompt
from selection import examples


class Numbers:
    """A stream with the least that one needs; the third of four rows is a prompt that is too long."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.position = count, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.position < self.count:
            self.position += 1
            yield {"n": self.position - 1 + 100 * self.epoch}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> int:
        return self.position

    def load_state_dict(self, state: int | None) -> None:
        self.position = state or 0


def render(number: int, row: Any) -> Prompt | None:
    if number % 4 == 2:
        return None
    return Prompt(id=number, epoch=0, content=str(row["n"]), token_ids=np.array([5]), columns={})


def make_stream(rows: RowStream, *, shuffle: bool = True, buffer_size: int = 5, seed: int = 3) -> StreamedPrompts:
    return StreamedPrompts(rows, render, seed=seed, shuffle=shuffle, buffer_size=buffer_size)


def visits(prompts: list[Prompt]) -> list[tuple[int, int, str]]:
    return [(prompt.epoch, prompt.id, str(prompt.content)) for prompt in prompts]


def test_the_order_is_pinned():
    """A changed order would break the resumption of saved runs: these numbers must never change."""
    assert [p.id for p in make_stream(Numbers(7), seed=7).take(9)] == [4, 3, 1, 0, 5, 1, 4, 3, 0]
    assert [p.id for p in make_stream(Numbers(7), shuffle=False).take(7)] == [0, 1, 3, 4, 5, 0, 1]


@given(
    count=st.integers(1, 20),
    buffer_size=st.integers(1, 9),
    shuffle=st.booleans(),
    before=st.integers(0, 50),
    pending=st.sets(st.integers(0, 49), max_size=4),
)
@examples(100)
def test_resume_anywhere_continues_the_uninterrupted_order(count, buffer_size, shuffle, before, pending):
    stream, options = make_stream(Numbers(count), buffer_size=buffer_size, shuffle=shuffle), (buffer_size, shuffle)
    taken = stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    resumed = make_stream(Numbers(count), buffer_size=options[0], shuffle=options[1])
    resumed.take(11)  # whatever the stream did before, only the state counts
    resumed.restore(state)
    wanted = [taken[n] for n in pending if n < before]
    assert visits(resumed.lookup([(p.id, p.epoch) for p in wanted])) == visits(wanted)
    following = visits(stream.take(30))
    assert visits(resumed.take(30)) == following and resumed.state() == stream.state()
    by_epoch: dict[int, list[int]] = {}
    for epoch, row, content in [*visits(taken), *following]:
        assert content == str(row + 100 * epoch)
        by_epoch.setdefault(epoch, []).append(row)
    *whole, _ = by_epoch.values()
    assert all(sorted(rows) == [n for n in range(count) if n % 4 != 2] for rows in whole)
    assert stream.record([])["prompts/overlong"] == resumed.record([])["prompts/overlong"]


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"n": n, "text": f"{n:03}"} for n in range(count)]


def written(folder: Path, kind: str) -> str:
    file, rows = folder / f"train.{kind}", rows_of(23)
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "csv":
        file.write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=4)
    return str(file)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "iterable", "folder", "shards"])
def test_every_kind_of_source_resumes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if kind == "shards" and int(datasets.__version__.split(".")[0]) < 5:
        pytest.skip("several shards of this version of datasets resume at other rows, which a run says")

    def opened() -> RowStream:
        whole = datasets.Dataset.from_list(rows_of(23))
        if kind == "iterable":
            path: str = name_rows(whole.to_iterable_dataset())
        elif kind == "shards":
            path = name_rows(whole.to_iterable_dataset(num_shards=3).map(lambda row: {"m": row["n"]}))
        elif kind == "folder":
            path = str(Path(written(tmp_path, "jsonl")).parent)
        else:
            path = written(tmp_path, kind)
        return open_stream(path, field="data.path", split="train", name=None)

    stream = make_stream(opened())
    taken = stream.take(31)
    assert {p.content for p in taken if p.epoch == 0} == {str(n) for n in range(23) if n % 4 != 2}
    expected = visits(stream.take(12))
    for done in (0, 3, 16, 17, 18, 31):
        before = make_stream(opened())
        before.take(done)
        resumed = make_stream(opened())
        resumed.restore(json.loads(json.dumps(before.state())))
        pending = [(p.id, p.epoch) for p in taken[:done][-3:]]
        assert visits(resumed.lookup(pending)) == visits(taken[:done][-3:])
        assert visits(resumed.take(43 - done)) == [*visits(taken[done:]), *expected]


def test_streams_that_cannot_resume_are_refused(tmp_path: Path):
    shuffled = datasets.Dataset.from_list(rows_of(40)).to_iterable_dataset().shuffle(seed=1, buffer_size=9)
    stream = make_stream(shuffled)
    stream.take(12)
    with pytest.raises(UserError, match=r"data.path: the stream does not go on where the run was saved"):
        make_stream(shuffled).restore(stream.state())
    other = make_stream(Numbers(40), buffer_size=6)
    with pytest.raises(UserError, match=r"saved with buffer_size=5, but this run has 6"):
        other.restore(stream.state())
    with pytest.raises(UserError, match=r"data.path='object:list': a stream is a datasets.IterableDataset"):
        open_stream(name_rows([{"n": 1}]), field="data.path", split="train", name=None)
    with pytest.raises(UserError, match=r"data.path: the stream has no rows"):
        make_stream(Numbers(0))
    file = tmp_path / "train.jsonl"
    file.write_text('{"n": 0}\n' * 9 + "{broken\n")
    stream = make_stream(open_stream(str(file), field="data.path", split="train", name=None))
    with pytest.raises(UserError, match=r"data.path='.*train.jsonl': line 10 is not valid JSON"):
        stream.take(9)


@pytest.mark.parametrize(
    ("path", "options", "part"),
    [
        ("train.jsonl", {"split": "dev"}, "is a single file, where split='dev' has no effect; leave it out"),
        ("train.jsonl", {"name": "main"}, "is a single file, where name='main' has no effect; leave it out"),
        ("trian.jsonl", {}, "no such file in the folder .*; did you mean train.jsonl?"),
        (" ", {}, "is empty; use a .jsonl"),
        (".", {"split": "dev"}, "datasets.load_dataset with streaming=True, name=None and split='dev' failed: Value"),
    ],
)
def test_data_are_looked_up_as_those_that_are_no_stream(tmp_path: Path, monkeypatch, path, options, part):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "jsonl")
    with pytest.raises(UserError, match=f"^data.path='{path}': {part}"):
        open_stream(path, **{"field": "data.path", "split": "train", "name": None, **options})


def test_rows_are_found_by_number_without_reading_on():
    endless = Numbers(10**9)
    endless.load_state_dict(7)
    assert numbered_rows(endless, [1500, 3]) == ({3: {"n": 3}, 1500: {"n": 1500}}, 1501)
    assert endless.position == 1501
    assert numbered_rows(Numbers(4), [2, 9]) == ({2: {"n": 2}}, 4)


def test_a_stream_that_fails_says_where():
    def rows() -> Iterator[dict[str, Any]]:
        yield from rows_of(8)
        raise ConnectionError("the server is gone")

    stream = make_stream(datasets.IterableDataset.from_generator(rows))
    with pytest.raises(TrainingError, match=r"data.path: the stream failed after row 5, .* the server is gone"):
        stream.take(9)


def test_the_first_rows_are_those_of_the_beginning_and_failures_are_named():
    stream = Numbers(9)
    stream.load_state_dict(5)
    assert first_rows(stream, 3) == first_rows(Numbers(9), 3)

    def rows() -> Iterator[dict[str, Any]]:
        raise ConnectionError("the server is gone")
        yield {}

    with pytest.raises(TrainingError, match=r"after row 0, .* the server is gone"):
        first_rows(datasets.IterableDataset.from_generator(rows), 3)


def test_values_of_csv_stay_text(tmp_path: Path):
    rows = [*open_stream(written(tmp_path, "csv"), field="data.path", split="train", name=None)]
    assert rows[7] == {"n": "7", "text": "007"}
