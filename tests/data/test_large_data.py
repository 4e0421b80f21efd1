"""Large data, which stay on disk: equal to the same data in memory, whatever happens to the cache."""

import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cohort.data import OnProgress, PromptRenderer, PromptSet, PromptStream, build_prompts, read_rows
from cohort.data.cache import cache_folder, cached_table
from cohort.data.rows import StoredRows
from cohort.errors import UserError
from data_files import read
from test_data import make_tokenizer

# what Arrow has no exact place for: different keys, mixed types, halves of surrogates, large numbers, NaN, nothing
ODD = [
    {"prompt": "one", "answer": "007", "n": 1},
    {"prompt": "two", "answer": 7, "n": 10**30, "deep": {"a": [1, {"b": None}]}},
    {"answer": None, "prompt": "three \ud800", "late": 1.5},
    {},
    {"prompt": [{"role": "user", "content": "four"}], "n": True, "answer": "\ud83d"},
    {"prompt": "five\u2028", "n": -0.0, "deep": {"c": 1e400}, "answer": ""},
]


@pytest.fixture(autouse=True)
def all_data_are_large(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("cohort.data.rows._BATCH", 4)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")


def in_memory(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch, **options: str) -> list[dict]:
    with monkeypatch.context() as patch:
        patch.setattr("cohort.data.files._IN_MEMORY_BYTES", 1 << 40)
        rows = read(folder, path, **options)
    assert isinstance(rows, list)
    return rows


def write(file: Path, rows: list[dict]) -> None:
    if file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows({"prompt": row["prompt"], "answer": f"00{i}"} for i, row in enumerate(rows))
    elif file.suffix == ".parquet":
        table = pa.Table.from_pylist(rows)
        place = table.schema.get_field_index("answer")
        table = table.set_column(place, "answer", table["answer"].dictionary_encode())
        pq.write_table(table, file, row_group_size=3)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))


PLAIN = [
    {"prompt": f"one plus {'two ' * (i % 5)}", "answer": str(i % 3), "tags": [i, None], "a.b": i} for i in range(11)
]


def check_same(stored: StoredRows, expected: list[dict]) -> None:
    """Whole rows, each row, each column and parts of them are those of the list."""
    assert isinstance(stored, StoredRows) and len(stored) == len(expected)
    assert repr(sorted_keys(stored)) == repr(sorted_keys(expected)), "also -0.0, True and inf"
    assert list(stored.columns) == list(dict.fromkeys(column for row in expected for column in row))
    for column in stored.columns:
        assert list(stored.values(column)) == [row.get(column) for row in expected]
    assert [stored[i] for i in range(-1, len(stored))] == [expected[-1], *expected]
    assert list(stored[1:9:3]) == expected[1:9:3]
    with pytest.raises(IndexError):
        stored[len(stored)]


def sorted_keys(rows: list[dict]) -> list[dict]:
    return [dict(sorted(row.items())) for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_rows_on_disk_are_those_in_memory(tmp_path, monkeypatch, name):
    write(tmp_path / name, PLAIN)
    expected = in_memory(tmp_path, name, monkeypatch)
    for _ in ("converted", "cached"):
        check_same(read(tmp_path, name), expected)


def test_odd_values_of_json_do_not_change(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", ODD)
    check_same(read(tmp_path, "a.jsonl"), in_memory(tmp_path, "a.jsonl", monkeypatch))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_folders_on_disk(tmp_path, monkeypatch, ending):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / f"train-0{ending}", PLAIN)
    write(folder / f"train-1{ending}", PLAIN[:3])
    check_same(read(tmp_path, "data"), in_memory(tmp_path, "data", monkeypatch))
    datasets.Dataset.from_list(PLAIN).save_to_disk(tmp_path / "saved")
    saved = read(tmp_path, "saved")
    check_same(saved, PLAIN)
    assert saved.digest is not None
    check_same(read_rows(named(datasets.Dataset.from_list(PLAIN)), field="data.path"), PLAIN)


def named(rows: object) -> str:
    from cohort.config.objects import name_rows

    return name_rows(rows)


@pytest.mark.parametrize(
    ("name", "end", "part"),
    [
        ("a.jsonl", b'\n{"prompt": "a",, "b": 1}', "line 3001 is not valid JSON"),
        ("a.jsonl", b'\n["a"]', 'line 3001 holds ["a"], which is not an object'),
        ("a.jsonl", b'\n{"prompt": "a', "line 3001 is not valid JSON"),
        ("a.jsonl", b'\n{"a": 1, "a": 2}', "line 3001 cannot be read as JSON: duplicate key 'a'"),
        ("a.jsonl", b'\n{"a": "\xff"}', "line 3001 is not UTF-8 text (byte 8)"),
        ("a.csv", b"1,2,3\n", "line 3002 has 3 values"),
        ("a.csv", b'1,"2', "line 3002 is not valid CSV"),
    ],
)
def test_the_last_line_is_refused_at_the_start_and_each_time(tmp_path, name, end, part):
    write(tmp_path / name, PLAIN[:1] * 3000)
    with (tmp_path / name).open("ab") as out:
        out.write(end)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            read(tmp_path, name)
        assert str(error.value).startswith(f"data.path={name!r}: ") and part in str(error.value)
    assert list(cache_folder().iterdir()) == [], "nothing of it is kept"


def test_the_cache_follows_the_content(tmp_path):
    file = tmp_path / "a.jsonl"
    write(file, PLAIN)
    before = read(tmp_path, "a.jsonl")
    state = file.stat()
    write(file, [{**row, "answer": "9"} for row in PLAIN])
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # same size and time
    after = read(tmp_path, "a.jsonl")
    assert before.digest != after.digest and set(after.values("answer")) == {"9"}
    assert list(before.values("answer")) == [row["answer"] for row in PLAIN], "a run goes on with what it has read"


@pytest.mark.parametrize("damage", [b"", b"ARROW1\0\0 and nothing", None])
def test_a_damaged_cache_is_written_again(tmp_path, monkeypatch, damage):
    write(tmp_path / "a.jsonl", PLAIN)
    read(tmp_path, "a.jsonl")
    (cached,) = cache_folder().glob("*.arrow")
    whole = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    check_same(read(tmp_path, "a.jsonl"), in_memory(tmp_path, "a.jsonl", monkeypatch))
    assert cached.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    """The disk is full, or the folder is none."""
    write(tmp_path / "a.jsonl", PLAIN)
    write(tmp_path / "a.parquet", PLAIN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        for name in ("a.jsonl", "a.parquet"):
            check_same(read(tmp_path, name), in_memory(tmp_path, name, monkeypatch))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache_folder().iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a.jsonl"))
    check_same(read(tmp_path, "a.jsonl"), in_memory(tmp_path, "a.jsonl", monkeypatch))


def test_two_processes_fill_one_cache(tmp_path):
    write(tmp_path / "a.jsonl", PLAIN * 2000)
    code = (
        "import cohort.data.files as f; f._IN_MEMORY_BYTES = 0\n"
        "rows = f.read_rows('a.jsonl', field='data.path'); print(rows.digest, len(rows), rows[-1]['answer'])"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [run.communicate()[0] for run in runs]
    assert said[0] == said[1] and said[0].split()[1:] == ["22000", "1"]
    assert len(list(cache_folder().iterdir())) == 1


def test_the_cache_is_bounded(monkeypatch):
    def write_table(sink: object) -> None:
        with pa.ipc.new_file(sink, pa.schema([("a", pa.int64())])) as writer:
            writer.write_table(pa.table({"a": list(range(1000))}))

    abandoned = cache_folder() / ".x.unfinished"
    cached_table("a", write_table)
    abandoned.write_bytes(b"x")
    os.utime(abandoned, (0, 0))
    for age, key in ((200, "a"), (100, "b")):
        cached_table(key, write_table)
        os.utime(cache_folder() / f"{key}.arrow", (time.time() - age,) * 2)
    first, _ = cached_table("a", write_table)  # used again: b is the oldest
    monkeypatch.setattr("cohort.data.cache._MAX_BYTES", 2 * (cache_folder() / "a.arrow").stat().st_size)
    cached_table("c", write_table)
    assert sorted(file.name for file in cache_folder().iterdir()) == ["a.arrow", "c.arrow"]
    monkeypatch.setattr("cohort.data.cache._MAX_BYTES", 0)
    cached_table("d", write_table)
    assert first["a"].to_pylist() == list(range(1000)), "a removed table can still be read"


def test_damaged_parquet(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["one"] * 9, "unread": [os.urandom(999) for _ in range(9)]}), file)
    whole = file.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1, 8):
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="is not a readable Parquet file"):
            read(tmp_path, "a.parquet")
    chunk = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    file.write_bytes(
        whole[:start] + b"\xff" * chunk.total_compressed_size + whole[start + chunk.total_compressed_size :]
    )
    rows = read(tmp_path, "a.parquet")
    with pytest.raises(UserError, match=r"^data\.path='a\.parquet': is not a readable Parquet file: column 'prompt': "):
        rows[0]
    file.write_bytes(whole)
    rows = read(tmp_path, "a.parquet")
    pq.write_table(pa.table({"prompt": ["two"] * 9, "unread": [b"" for _ in range(9)]}), file)
    with pytest.raises(UserError, match=r"changed since the run started|not a readable Parquet file"):
        list(rows.values("prompt"))


# Progress


def told_by(use: Callable[[OnProgress], object]) -> dict[str, list[tuple[float, float]]]:
    """What is told of each name: it never goes back, and ends with all of it."""
    told: dict[str, list[tuple[float, float]]] = {}
    use(lambda name, done, total: told.setdefault(name, []).append((done, total)))
    for steps in told.values():
        assert steps == sorted(steps) and len({total for _, total in steps}) == 1 and steps[-1][0] == steps[-1][1]
    return told


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_how_far_a_file_is_converted_is_told(tmp_path, name):
    write(tmp_path / name, PLAIN * 50)
    size = (tmp_path / name).stat().st_size / 1e6
    told = told_by(lambda on_progress: list(read(tmp_path, name, on_progress=on_progress).values("prompt")))
    doing = "converting prompt of a.parquet" if name == "a.parquet" else f"converting {name} (MB)"
    assert set(told) == {f"reading {name} (MB)", doing}
    assert told[doing][-1] == ((550, 550) if name == "a.parquet" else (size, size))
    if name in ("a.jsonl", "a.csv"):
        assert len({done for done, _ in told[doing]}) > 2, "not only the beginning and the end"
    again = told_by(lambda on_progress: list(read(tmp_path, name, on_progress=on_progress).values("prompt")))
    assert set(again) == {f"reading {name} (MB)"}, "it is converted once"


def test_files_of_a_folder_have_one_progress(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(3):
        write(tmp_path / "data" / f"train-{number}.jsonl", PLAIN * (1 + 50 * number))
    size = sum(file.stat().st_size for file in (tmp_path / "data").iterdir()) / 1e6
    told = told_by(lambda on_progress: read(tmp_path, "data", on_progress=on_progress))
    assert set(told) == {"reading data (MB)", "converting data (MB)"}
    assert told["converting data (MB)"][-1] == (size, size)


def test_how_many_prompts_are_tokenized_is_told(tmp_path):
    write(tmp_path / "a.jsonl", PLAIN * 50)
    rows, settings = read(tmp_path, "a.jsonl"), {"max_prompt_tokens": LIMIT, "overlong": "drop"}
    build = lambda on_progress: build_prompts(  # noqa: E731
        rows, PromptRenderer(make_tokenizer()), on_progress=on_progress, **settings
    )
    (steps,) = told_by(build).values()
    assert len(set(steps)) > 2 and steps[-1] == (550, 550)
    assert told_by(build) == {}, "remembered"


# Prompts

LIMIT = 40  # short texts are within it by their bytes, longer ones by their tokens


def same_prompts(rows: list[dict] | StoredRows, monkeypatch: pytest.MonkeyPatch, **options: object) -> PromptSet:
    """Build prompts that are rendered when sampled, and compare them with those that are rendered at once."""
    settings = {"max_prompt_tokens": LIMIT, "overlong": "drop", **options}
    with monkeypatch.context() as patch:
        patch.setattr("cohort.data.prompts._RENDERED_ROWS", 0)
        sampled = build_prompts(rows, PromptRenderer(make_tokenizer()), **settings)
    naive = build_prompts([dict(row) for row in rows], PromptRenderer(make_tokenizer()), **settings)
    assert not isinstance(sampled.prompts, tuple) and sampled.num_dropped_overlong == naive.num_dropped_overlong
    assert len(sampled.prompts) == len(naive.prompts)
    assert sampled.prompts.longest_tokens >= max(len(prompt.token_ids) for prompt in naive.prompts)
    for a, b in zip(sampled.prompts, naive.prompts, strict=True):
        assert (a.id, a.epoch, a.content, a.columns) == (b.id, b.epoch, b.content, b.columns)
        assert a.token_ids.tolist() == b.token_ids.tolist()
    orders = [PromptStream(prompts, seed=3).take(30) for prompts in (sampled, naive)]
    assert [(p.id, p.epoch) for p in orders[0]] == [(p.id, p.epoch) for p in orders[1]]
    return sampled


TEXTS = ["one", "two", "plus " * 5, "two " * 9, "two " * 40, "<s>x"[3:], "é one" * 4]
MIXED = [
    {"prompt": content, "answer": i}
    for i, content in enumerate(
        [
            *TEXTS,
            *([{"role": "user", "content": text}] for text in TEXTS),
            [{"role": "system", "content": "be"}, {"role": "user", "content": "two " * 30}],
            [{"role": "system", "content": "be"}, {"role": "user", "content": "two"}],
            [{"role": "user", "content": "one", "name": "x"}],
        ]
    )
]


def test_prompts_rendered_when_sampled_are_those_rendered_at_once(tmp_path, monkeypatch):
    same_prompts(MIXED, monkeypatch)
    write(tmp_path / "a.jsonl", MIXED)
    first = same_prompts(read(tmp_path, "a.jsonl"), monkeypatch)
    assert len(list(cache_folder().glob("*.json"))) == 1
    monkeypatch.setattr(PromptRenderer, "find_lengths", None)  # remembered
    again = same_prompts(read(tmp_path, "a.jsonl"), monkeypatch)
    assert again.num_dropped_overlong == first.num_dropped_overlong == 2
    with pytest.raises(TypeError):  # another limit has not been remembered
        same_prompts(read(tmp_path, "a.jsonl"), monkeypatch, max_prompt_tokens=LIMIT + 1)


@pytest.mark.parametrize("value", [None, 7, " ", "a \ud800", [], [{"role": "user"}], "<s> [user] one"])
def test_the_last_prompt_is_refused_at_the_start(tmp_path, value):
    rows = [{"prompt": "one"}] * 50 + [{"prompt": value}]
    write(tmp_path / "a.jsonl", rows)
    messages = []
    for of in (rows, read(tmp_path, "a.jsonl")):
        with pytest.raises(UserError) as error:
            build_prompts(of, PromptRenderer(make_tokenizer()), max_prompt_tokens=99, overlong="drop")
        messages.append(str(error.value))
    assert messages[0] == messages[1] and messages[0].startswith("data.prompt='prompt': row 51")


def test_overlong_prompts_of_large_data_are_refused_with_the_same_words(tmp_path):
    write(tmp_path / "a.jsonl", MIXED)
    for options in ({"max_prompt_tokens": LIMIT, "overlong": "error"}, {"max_prompt_tokens": 1, "overlong": "drop"}):
        messages = []
        for rows in (MIXED, read(tmp_path, "a.jsonl")):
            with pytest.raises(UserError) as error:
                build_prompts(rows, PromptRenderer(make_tokenizer()), **options)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_a_run_resumes_with_large_data_and_from_before_they_stayed_on_disk(tmp_path):
    write(tmp_path / "a.jsonl", MIXED)
    options = {"max_prompt_tokens": LIMIT, "overlong": "drop"}
    renderer = PromptRenderer(make_tokenizer())
    naive = PromptStream(build_prompts(MIXED, renderer, **options), seed=1)
    stored = PromptStream(build_prompts(read(tmp_path, "a.jsonl"), renderer, **options), seed=1)
    expected = naive.take(20)
    stored.take(7)
    for state in (stored.state(), {**naive.state(), "epoch": 0, "position": 7}):
        resumed = PromptStream(build_prompts(read(tmp_path, "a.jsonl"), renderer, **options), seed=1)
        resumed.restore(json.loads(json.dumps(state)))
        assert [(p.id, p.epoch) for p in resumed.take(13)] == [(p.id, p.epoch) for p in expected[7:]]
    found = resumed.lookup([(p.id, p.epoch) for p in expected[:3]])
    assert [(p.id, p.content) for p in found] == [(p.id, p.content) for p in expected[:3]]
    write(tmp_path / "a.jsonl", [{**row, "answer": "?"} for row in MIXED])
    other = PromptStream(build_prompts(read(tmp_path, "a.jsonl"), renderer, **options), seed=1)
    with pytest.raises(UserError, match="prompts_sha256="):
        other.restore(stored.state())


def test_few_prompts_are_rendered_before_they_are_sampled(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", [{"prompt": text} for text in TEXTS] * 20)
    rendered: list[object] = []
    render = PromptRenderer.render
    monkeypatch.setattr(PromptRenderer, "render", lambda *args, **at: rendered.append(args[1]) or render(*args, **at))
    build_prompts(read(tmp_path, "a.jsonl"), PromptRenderer(make_tokenizer()), max_prompt_tokens=LIMIT, overlong="drop")
    assert set(rendered) == {"one", "a", "two " * 40}, "the first of its kind, the template's length, and what is long"


def test_a_template_that_makes_more_of_some_texts_is_found_when_they_are_sampled(tmp_path):
    template = "{% for m in messages %}{{ m.content * (60 if 'plus' in m.content else 1) }}{% endfor %}"
    write(tmp_path / "a.jsonl", [{"prompt": "one"}, {"prompt": "plus one"}])
    renderer = PromptRenderer(make_tokenizer(template))
    prompts = build_prompts(read(tmp_path, "a.jsonl"), renderer, max_prompt_tokens=25, overlong="drop").prompts
    with pytest.raises(UserError, match=r"row 2: the chat template makes \d+ tokens of this prompt, more than"):
        prompts[:]
