"""Sources of the training data: mixtures, conditions, functions, draws and held-out rows."""

import json
import os
import resource
from collections import Counter
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cohort.config import config_from_dict, load_config
from cohort.config.load import to_yaml
from cohort.data import PromptRenderer, PromptSet, PromptStream, TrainingRows, build_prompts, read_training_rows
from cohort.data.cache import cache_folder
from cohort.errors import UserError
from cohort.rollout.environments.tool_loop import ToolLoop
from configs import MINIMAL, message
from test_data import make_tokenizer, words
from tiny import write_jsonl

A = [{"prompt": f"one plus {i}", "answer": str(i), "level": i % 4} for i in range(9)]
B = [{"question": f"two plus {i}", "gold": f"00{i}", "tags": ["x", None]} for i in range(5)]
TO_ROW = """
def to_row(row):
    row["answer"] = row["answer"].split("####")[-1].strip()
    return row if row["answer"] != "3" else None
"""


@pytest.fixture(params=["in memory", "on disk"])
def folder(request, tmp_path, tmp_path_factory, monkeypatch) -> Path:
    """Every test runs with small data, and with the same data taken as large."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    if request.param == "on disk":
        monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
        monkeypatch.setattr("cohort.data.rows._BATCH", 4)
        monkeypatch.setattr("cohort.data.sources._BATCH", 4)
    write_jsonl(tmp_path / "a.jsonl", A)
    pq.write_table(pa.Table.from_pylist(B), tmp_path / "b.parquet")
    (tmp_path / "rows.py").write_text(TO_ROW)
    return tmp_path


def read_all(folder: Path, data: Any, **sections: Any) -> TrainingRows:
    with chdir(folder):
        return read_training_rows(config_from_dict({**MINIMAL, "data": data, **sections}))


def rows_of(folder: Path, data: Any, **sections: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in read_all(folder, data, **sections).train]


def refused(folder: Path, data: Any, **sections: Any) -> str:
    with pytest.raises(UserError) as error:
        read_all(folder, data, **sections)
    return str(error.value)


TWO = [
    {"path": "a.jsonl", "where": "level in (0, 1) and answer != '8'"},
    {"path": "b.parquet", "prompt": "question", "columns": {"gold": "answer"}, "rows": 3, "source": "twos"},
]


def test_sources_are_joined_with_one_prompt_column_and_their_names(folder):
    rows = rows_of(folder, TWO)
    assert [row["answer"] for row in rows[:4]] == ["0", "1", "4", "5"] and len(rows) == 7
    assert rows[0] == {**A[0], "source": "a"}
    assert all(row == {"prompt": f"two plus {int(row['answer'])}", "answer": row["answer"], "tags": ["x", None],
                       "source": "twos"} for row in rows[4:])  # fmt: skip
    assert rows_of(folder, TWO) == rows, "the same seed draws the same rows"
    draws = {tuple(row["answer"] for row in rows_of(folder, TWO, train={"seed": seed})[4:]) for seed in range(9)}
    assert len(draws) > 1 and all(list(draw) == sorted(draw) for draw in draws)
    assert [row["answer"] for row in rows_of(folder, {"path": "a.jsonl", "rows": 1.0})] == [r["answer"] for r in A]
    assert len(rows_of(folder, {"path": "a.jsonl", "rows": 0.5})) == 4


def test_the_configuration_of_sources_is_written_and_read_back(folder):
    config = config_from_dict({**MINIMAL, "data": TWO}, ["data.1.rows=2"], base_dir=folder)
    assert config.data.sources[1].rows == 2 and config.data.sources[0].path == str(folder / "a.jsonl")
    (folder / "saved.yaml").write_text(to_yaml(config))
    assert load_config(folder / "saved.yaml") == config


@pytest.mark.parametrize(
    ("where", "answers"),
    [
        ("level >= 2", "2 3 6 7"),
        ("answer == '7' or not level > 0", "0 4 7 8"),
        (r"matches(prompt, 'plus [78]')", "7 8"),
        ("'plus 5' in prompt", "5"),
        ("level == None", ""),
        ("level > 'a'", "cannot compare number with text"),
        ("levle > 1", "at character 1: there is no column levle; did you mean level?"),
        ("answer > 3", "cannot compare text with number; text is in quotes"),
    ],
)
def test_where_is_a_condition_as_in_the_filter_of_the_page(folder, where, answers):
    data = {"path": "a.jsonl", "where": where}
    if answers and answers[0].isdigit():
        for _ in ("found", "remembered"):
            assert " ".join(row["answer"] for row in rows_of(folder, data)) == answers
    else:
        assert (answers or "holds for none of 9 rows") in refused(folder, data)


def test_a_column_of_text_and_numbers_cannot_be_compared(folder):
    write_jsonl(folder / "a.jsonl", [*A, {"prompt": "one", "level": "Level 5"}])
    assert "level is text in row 10 and a number in row 1" in refused(folder, {"path": "a.jsonl", "where": "level > 1"})


# Functions


def test_a_function_changes_rows_and_drops_them(folder):
    write_jsonl(folder / "a.jsonl", [{**row, "answer": f"because\n#### {row['answer']}"} for row in A])
    data = {"path": "a.jsonl", "map": "rows.py:to_row"}
    expected = [row for row in A if row["answer"] != "3"]
    assert rows_of(folder, data) == expected
    (folder / "rows2.py").write_text(TO_ROW.replace('"3"', '"4"'))
    by_source = [{**data, "source": "x", "map": "rows2.py:to_row"}, data]
    mixed = rows_of(folder, by_source)
    assert [r["answer"] for r in mixed if r["source"] == "x"] == [r["answer"] for r in A if r["answer"] != "4"]
    assert [r["answer"] for r in mixed if r["source"] == "a"] == [r["answer"] for r in expected]


def test_the_result_of_a_function_is_kept_for_the_same_rows_and_code_only(folder, monkeypatch):
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
    code = "import os\ndef f(row):\n    with open('calls', 'a') as f: f.write('.')\n    return {**row, 'n': %d}\n"
    (folder / "f.py").write_text(code % 1)
    data, calls = {"path": "a.jsonl", "map": "f.py:f"}, folder / "calls"
    for _ in range(2):
        assert {row["n"] for row in rows_of(folder, data)} == {1}
    assert len(calls.read_text()) == 9
    write_jsonl(folder / "a.jsonl", A[:2])
    assert len(rows_of(folder, data)) == 2 and len(calls.read_text()) == 11
    key_of = {file.name for file in cache_folder().glob("*.arrow")}
    (folder / "g.py").write_text(code % 2)
    assert {row["n"] for row in rows_of(folder, {**data, "map": "g.py:f"})} == {2}
    assert len({file.name for file in cache_folder().glob("*.arrow")} - key_of) == 1
    state = {"n": 3}
    function = {**data, "map": lambda row: {**row, **state}}  # may depend on anything, so it is called each time
    assert {row["n"] for row in rows_of(folder, function)} == {3}
    state["n"] = 4
    assert {row["n"] for row in rows_of(folder, function)} == {4}


def test_a_mixture_of_small_and_large_data_is_known_by_its_content(folder, monkeypatch):
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", (folder / "a.jsonl").stat().st_size - 1)
    write_jsonl(folder / "c.jsonl", B[:3])
    data = [{"path": "a.jsonl"}, {"path": "c.jsonl", "prompt": "question"}]
    digests = [read_all(folder, data).train.digest for _ in range(2)]
    assert digests[0] == digests[1] is not None
    states = [PromptStream(prompts_of(folder, data), seed=1).state() for _ in range(2)]
    assert states[0] == states[1] and len(list(cache_folder().glob("*.json"))) == 1, "lengths are kept"
    write_jsonl(folder / "c.jsonl", [*B[:2], {**B[2], "gold": "other"}])
    assert read_all(folder, data).train.digest != digests[0]
    with pytest.raises(UserError, match="different order of prompts"):
        PromptStream(prompts_of(folder, data), seed=1).restore(states[0])


def test_how_many_rows_a_function_has_seen_is_told(folder):
    told: list[tuple[str, float, float]] = []
    config = config_from_dict({**MINIMAL, "data": {"path": "a.jsonl", "map": "rows.py:to_row"}}, base_dir=folder)
    read_training_rows(config, on_progress=lambda *how: told.append(how))
    assert [how[1:] for how in told if how[0] == "calling data.map"] == [(0, 9), (9, 9)]


def test_a_function_from_elsewhere_is_called_anew_when_its_file_changes(folder, monkeypatch):
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
    code = "from functools import partial\ndef f(row, n): return {**row, 'n': n}\nto_row = partial(f, n=%d)\n"
    for n in (1, 2):
        (folder / f"v{n}").mkdir()
        (folder / f"v{n}" / "f.py").write_text(code % n)
        assert {row["n"] for row in rows_of(folder, {"path": "a.jsonl", "map": f"v{n}/f.py:to_row"})} == {n}


def test_a_run_resumes_with_the_same_rows_of_changed_code(folder):
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(f"{TO_ROW}\n# {name}\n")
    one, two, other = (
        PromptStream(prompts_of(folder, {"path": "a.jsonl", "map": use}), seed=1)
        for use in ("one.py:to_row", "two.py:to_row", None)
    )
    two.restore(one.state())
    with pytest.raises(UserError, match="different order of prompts"):
        other.restore(one.state())


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("return row['anwser']", "row 2: KeyError: 'anwser' (at {file}:3)"),
        ("return 'x'", "row 2: returned 'x'; return a dict of columns, or None"),
        (
            "return {**row, 'x': {1, 2}}",
            "row 2: returned {{1, 2}} as 'x', which cannot be kept: TypeError: Object of type set is not JSON "
            "serializable; return text, such as str(row['x']), or numbers, true, false, None, and lists and dicts of "
            "them, or leave the column out",
        ),
        ("open('missing.txt')", "row 2: FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'"),
    ],
)
def test_a_function_that_fails_names_the_row_and_its_line(folder, body, part):
    (folder / "h.py").write_text(f"def f(row):\n    if row['level'] == 2:\n        {body}\n    return row\n")
    said = refused(folder, {"path": "a.jsonl", "where": "level != 0", "rows": 1.0, "map": "h.py:f"})
    assert said.startswith(f"data.map='{folder}/h.py:f': row 3: " + part.format(file=folder / "h.py")[7:])
    said = refused(folder, [{"path": "b.parquet", "prompt": "question"}, {"path": "a.jsonl", "map": "h.py:f"}])
    assert said.startswith(f"data.sources.1.map='{folder}/h.py:f': row 3: ")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (pa.array([0], pa.timestamp("us")), "as 'at', which cannot be kept: TypeError: Object of type datetime is not"),
        (pa.array([b"x"]), "row 1: returned b'x' as 'at', which cannot be kept: TypeError: Object of type bytes is"),
        (pa.array([2**50], pa.timestamp("ms")), "path='{b}': column 'at', of type timestamp[ms], has a value that Pyt"),
    ],
)
def test_values_of_parquet_that_json_or_python_cannot_hold(folder, values, part):
    pq.write_table(pa.table({"prompt": ["one"], "at": values}), folder / "b.parquet")
    (folder / "same.py").write_text("def same(row): return row\n")
    assert part.format(b=folder / "b.parquet") in refused(folder, {"path": "b.parquet", "map": "same.py:same"})
    (folder / "text.py").write_text("def text(row): return {**row, 'at': str(row['at'])}\n")
    if "cannot be kept" in part:
        assert len(rows_of(folder, {"path": "b.parquet", "map": "text.py:text"})) == 1, "as the message says"


def test_a_function_that_drops_all_rows(folder):
    (folder / "h.py").write_text("def f(row): return None\n")
    assert "returns None for each of 9 rows" in refused(folder, {"path": "a.jsonl", "map": "h.py:f"})


# Held-out rows


def test_held_out_rows_are_never_trained_on_and_neither_are_their_copies(folder):
    write_jsonl(folder / "a.jsonl", [{**row, "copy": i} for i in range(4) for row in A])
    for seed in range(3):
        found = read_all(folder, {"path": "a.jsonl"}, train={"seed": seed}, eval={"rows": 3})
        train, held_out = ([row["prompt"] for row in rows] for rows in (found.train, found.held_out))
        assert len(set(held_out)) == len(held_out) == 3 and not {*train} & {*held_out}
        assert len(train) == 4 * 6 and found.num_left_out == 9
        assert [row["copy"] for row in found.train] == sorted(row["copy"] for row in found.train), "in their order"
    said = refused(folder, {"path": "a.jsonl"}, eval={"rows": 9})
    assert "leaves nothing to train on: of 36 rows, 9 have different prompts; use at most 8" in said
    mixed = read_all(folder, TWO, eval={"rows": 0.1})
    assert {row["source"] for row in mixed.train} == {"a", "twos"} and len(mixed.held_out) == round(0.1 * (16 + 3))


def test_rows_without_prompts_are_held_out_where_an_environment_writes_them(folder):
    environment = {"rollout": {"environment": "e.py:E"}}
    write_jsonl(folder / "a.jsonl", [{"task": row["prompt"], "level": row["level"]} for row in A * 2])
    found = read_all(folder, {"path": "a.jsonl"}, eval={"rows": 3}, **environment)
    train, held_out = ([row["task"] for row in rows] for rows in (found.train, found.held_out))
    assert len(set(held_out)) == len(held_out) == 3 and not {*train} & {*held_out}
    assert (len(train), found.num_left_out) == (12, 3)
    write_jsonl(folder / "a.jsonl", [{"prompt": "one"}, *({"prompt": None, "task": n} for n in (1, 1, 2)), *A[:3]])
    said = refused(folder, {"path": "a.jsonl"}, eval={"rows": 6}, **environment)
    assert "of 7 rows, 6 have different prompts; use at most 5" in said
    said = refused(folder, {"path": "a.jsonl", "prompt": "q"}, eval={"rows": 3})
    assert "data.prompt='q': the data has no such column" in said


# Prompts and their order


TOKENIZER = cache(make_tokenizer)


def prompts_of(folder: Path, data: Any, **sections: Any) -> PromptSet:
    with chdir(folder):
        config = config_from_dict({**MINIMAL, "data": data, **sections})
        rows = read_training_rows(config).train
    renderer = PromptRenderer(
        TOKENIZER(), system_prompt=config.data.system_prompt, system_prompts=config.data.system_prompts
    )
    options: dict[str, Any] = {"overlong": "drop", "weighted": config.data.weights is not None}
    return build_prompts(rows, renderer, max_prompt_tokens=40, field=config.data.field, **options)


def test_each_source_may_have_its_own_system_prompt(folder):
    data = {"system_prompt": "be", "sources": [TWO[0], {**TWO[1], "system_prompt": "be brief"}]}
    prompts = prompts_of(folder, data)
    assert [words(p.token_ids)[:23] for p in prompts.prompts] == ["<s> [system] be [user] "] * 4 + [
        "<s> [system] be brief ["
    ] * 3
    assert prompts.sources == (("a", 4), ("twos", 7))


def test_tools_chat_with_the_system_prompt_of_the_source():
    loop = ToolLoop([], executor=None, prompt_column="prompt", system_prompt="be", system_prompts={"b": "be brief"})
    for source, expected in (("a", "be"), ("b", "be brief"), (None, "be")):
        messages = loop._messages({"prompt": "one", "source": source}, "")
        assert [message["content"] for message in messages] == [expected, "one"]


def test_errors_in_rows_of_sources_count_them_in_their_file(folder):
    write_jsonl(folder / "c.jsonl", [*A, {"prompt": " ", "level": 2}])
    with pytest.raises(UserError) as error:
        prompts_of(folder, [TWO[1], {"path": "c.jsonl", "where": "level == 2", "map": "rows.py:to_row"}])
    assert "row 10" in str(error.value)
    (folder / "same.py").write_text("def same(row): return row\n")
    with pytest.raises(UserError) as error:
        prompts_of(folder, [TWO[1], {"path": "c.jsonl", "where": "level == 2", "map": "same.py:same"}])
    assert (
        str(error.value) == f"data.prompt='prompt': row 10 of data.sources.1.path='{folder}/c.jsonl': the text is empty"
    )


WEIGHTED = [{**TWO[0], "where": "level != 9", "weight": 1}, {**TWO[1], "rows": 5, "weight": 3}]
KINDS = {
    "joined": (TWO, None),
    "weighted": (WEIGHTED, (1.0, 3.0)),
    "one": ({"path": "a.jsonl", "where": "level != 1", "rows": 5}, None),
    "mapped": ({"path": "a.jsonl", "map": "rows.py:to_row"}, None),
}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_at_any_prompt_in_the_same_order(folder, kind, shuffle):
    data, weights = KINDS[kind]
    options: dict[str, Any] = {"seed": 3, "shuffle": shuffle, "weights": weights}
    visits = [(p.id, p.epoch) for p in PromptStream(prompts_of(folder, data), **options).take(60)]
    assert len(set(visits)) == 60, "a row is visited once per epoch"
    stream = PromptStream(prompts_of(folder, data), **options)
    for taken in (0, 1, 6, 7, 13):
        stream.take(taken)
        again = PromptStream(prompts_of(folder, data), **options)
        again.restore(json.loads(json.dumps(stream.state())))
        done = sum(t for t in (0, 1, 6, 7, 13) if t <= taken)
        assert [(p.id, p.epoch) for p in again.take(60 - done)] == visits[done:]
        assert [(p.id, p.epoch) for p in again.lookup(visits[:5])] == visits[:5]


def test_weights_are_the_shares_of_any_stretch(folder):
    prompts = prompts_of(folder, WEIGHTED)
    sources = [p.columns["source"] for p in PromptStream(prompts, seed=1, weights=(1, 3)).take(400)]
    for start in range(0, 400, 7):
        share = Counter(sources[start : start + 40])["twos"]
        assert abs(share - 30) <= 1 or start > 360
    of_a = [p.id for p in PromptStream(prompts, seed=1, weights=(1, 3)).take(400) if p.columns["source"] == "a"]
    assert all(sorted(of_a[i : i + 9]) == list(range(9)) for i in range(0, 90, 9)), "each prompt once per epoch"
    assert of_a[:9] != of_a[9:18] != list(range(9))


def test_another_order_is_not_resumed(folder):
    prompts = prompts_of(folder, WEIGHTED)
    state = PromptStream(prompts, seed=1, weights=(1, 3)).state()
    for other in ({"weights": (1, 2)}, {"weights": None}):
        with pytest.raises(UserError, match="saved with weights="):
            PromptStream(prompts, seed=1, **other).restore(state)
    with pytest.raises(UserError, match="saved with weights=None"):
        PromptStream(prompts, seed=1, weights=(1, 3)).restore(PromptStream(prompts, seed=1).state())


def test_a_source_without_short_prompts_has_no_share(folder):
    write_jsonl(folder / "a.jsonl", [{"prompt": "one " * n, "level": 0, "answer": "1"} for n in (60, 50)])
    with pytest.raises(UserError) as error:
        prompts_of(folder, WEIGHTED)
    shortest = 3 + 50  # <s> [user] ... [assistant]
    assert str(error.value) == (
        "rollout.max_prompt_tokens=40: no prompt of data.sources.0 ('a') is that short, so that it cannot have a share "
        f"of the mixture; the shortest of 2 has {shortest} tokens; use at least {shortest}, or remove the source"
    )
    joined = [{key: value for key, value in source.items() if key != "weight"} for source in WEIGHTED]
    assert len(prompts_of(folder, joined).prompts) == 5


def test_a_source_whose_rows_are_all_held_out_has_no_share(folder):
    write_jsonl(folder / "a.jsonl", A[:1])
    with pytest.raises(UserError, match=r"data\.sources\.[01]: eval\.rows leaves no row of '(a|twos)' to train on"):
        prompts_of(folder, WEIGHTED, eval={"rows": 5})


# Damage, found before anything expensive


def damaged(folder: Path, name: str) -> Any:
    """Write damaged data, and return the section."""
    jsonl, parquet = folder / "a.jsonl", folder / "b.parquet"
    second = {"path": "b.parquet", "prompt": "question"}
    both: list[dict[str, Any]] = [{"path": "a.jsonl"}, second]
    whole, table = jsonl.read_bytes(), parquet.read_bytes()
    match name:
        case "cut off in a line":
            jsonl.write_bytes(whole[:-20])
        case "cut off in a character":
            jsonl.write_bytes(whole + '{"prompt": "é'.encode()[:-1])
        case "zeros at the end, as after a crash":
            jsonl.write_bytes(whole + b"\0" * 4096)
        case "an object over two lines":
            jsonl.write_bytes(whole + b'{"prompt":\n"one"}\n')
        case "UTF-16":
            jsonl.write_text(whole.decode(), encoding="utf-16")
        case "a table as JSON lines":
            jsonl.write_bytes(table)
        case "a pointer instead of the file":
            parquet.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
        case "half a Parquet file":
            parquet.write_bytes(table[: len(table) // 2])
        case "a Parquet file without its end":
            parquet.write_bytes(table[:-1])
        case "Parquet with zeros inside":
            parquet.write_bytes(table[:4] + b"\0" * 300 + table[304:])
        case "an empty file":
            jsonl.write_bytes(b"")
        case "only blank lines":
            jsonl.write_bytes(b"\n \n\n")
        case "a missing source":
            both[1] = {"path": "c.parquet", "prompt": "question"}
        case "a missing split":
            both[1] = {**second, "split": "dev"}
        case "another prompt column":
            both[1] = {"path": "b.parquet"}
        case "a misspelled prompt column":
            both[1] = {**second, "prompt": "qestion"}
        case "a prompt column that exists already":
            both[0] = {"path": "a.jsonl", "prompt": "answer"}
        case "a duplicate":
            both.append(second)
        case "empty after where":
            both[0] = {"path": "a.jsonl", "where": "level > 5"}
        case "too many rows":
            both[1] = {**second, "rows": 6}
        case "a column called source":
            both[0] = {"path": "a.jsonl", "columns": {"level": "source"}}
        case "a renamed column that is missing":
            both[0] = {"path": "a.jsonl", "columns": {"lvl": "difficulty"}}
        case "two columns of one name":
            both[0] = {"path": "a.jsonl", "columns": {"level": "answer"}}
        case "unreadable":
            os.chmod(jsonl, 0)
    return both


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cut off in a line", "data.sources.0.path='{a}': line 9 is not valid JSON"),
        ("cut off in a character", "line 10 is not UTF-8 text (byte 13)"),
        ("zeros at the end, as after a crash", "line 10 is not valid JSON"),
        ("an object over two lines", "line 10 is not valid JSON"),
        ("UTF-16", "line 1 is not UTF-8 text (byte 1); save the file as UTF-8"),
        ("a table as JSON lines", "data.sources.0.path='{a}': line 1 is not"),
        ("a pointer instead of the file", "data.sources.1.path='{b}': is not a readable Parquet file"),
        ("half a Parquet file", "data.sources.1.path='{b}': is not a readable Parquet file"),
        ("a Parquet file without its end", "data.sources.1.path='{b}': is not a readable Parquet file"),
        ("Parquet with zeros inside", "data.sources.1.path='{b}': is not a readable Parquet file"),
        ("an empty file", "data.sources.0.path='{a}': the file is empty (0 bytes)"),
        ("only blank lines", "data.sources.0.path='{a}': has no rows"),
        (
            "a missing source",
            "data.sources.1.path='c.parquet': no such file in the folder {folder}; did you mean b.par",
        ),
        ("a missing split", "data.sources.1.path='{b}': is a single file, where split='dev' has no effect"),
        (
            "another prompt column",
            "row 1 of data.sources.1.path='{b}': a prompt is text or a list of chat messages, not",
        ),
        ("a misspelled prompt column", "data.sources.1.prompt: 'qestion': the data has no such column; did you mean"),
        ("a prompt column that exists already", "data.sources.0.prompt: 'answer' is renamed to 'prompt', which is"),
        ("a duplicate", "sources.2.source: 'b' is also the name of sources.1; give each source a name of its own"),
        ("empty after where", "data.sources.0.where: 'level > 5' holds for none of 9 rows"),
        ("too many rows", "data.sources.1.rows: 6 is more than the 5 rows that there are; use at most 5"),
        ("a column called source", "data.sources.0: the data has a column 'source', which says what source"),
        ("a renamed column that is missing", "data.sources.0.columns: 'lvl': the data has no such column"),
        ("two columns of one name", "data.sources.0.columns: more than one column would be called 'answer'"),
    ],
)
def test_damaged_data_and_wrong_sources_are_refused(folder, name, part):
    data = damaged(folder, name)
    for _ in ("first seen", "again"):
        with pytest.raises(UserError) as error:
            prompts_of(folder, data)
        said = part.format(a=folder / "a.jsonl", b=folder / "b.parquet", folder=folder)
        assert said in str(error.value), str(error.value)


@pytest.mark.parametrize("folder", ["on disk"], indirect=True)
@pytest.mark.parametrize("damage", ["empty", "half", "other bytes", "removed", "a folder", "full disk", "no cache"])
def test_damage_to_the_cache_changes_no_row(folder, damage, monkeypatch):
    write_jsonl(folder / "a.jsonl", A * 20)
    data = [{**TWO[0], "map": "rows.py:to_row"}, TWO[1]]
    sections = {"data": data, "eval": {"rows": 2}}
    whole = read_all(folder, **sections)
    expected = [list(whole.train), list(whole.held_out)]
    assert len(list(cache_folder().glob("*.arrow"))) >= 4
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if damage == "full disk":
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    elif damage == "no cache":
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "a.jsonl"))
    for file in cache_folder().glob("*") if cache_folder().is_dir() else ():
        content = file.read_bytes()
        file.unlink()
        if damage == "a folder":
            file.mkdir()
        elif damage != "removed":
            file.write_bytes({"empty": b"", "half": content[: len(content) // 2]}.get(damage, content[::-1]))
    try:
        for _ in range(2):
            found = read_all(folder, **sections)
            assert [list(found.train), list(found.held_out)] == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"path": "a", "sources": [{"path": "b"}]}, "data: path: a has no effect with sources; say it of each source"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "data: sources.1.weight: missing; either all sources have"),
        ([{"path": "a", "weight": 0}], "data.sources.0.weight: 0: input should be greater than 0"),
        ([{"prompt": "q"}], "data.sources.0: path: missing; this key is required"),
        ([{"path": "a", "wieght": 1}], "data.sources.0.wieght: unknown key; did you mean weight?"),
        ([{"path": "a", "source": "a/b"}], "data.sources.0.source: 'a/b': must be letters, digits"),
        ({"path": "a", "rows": 0}, "data.rows: 0: must be a whole number of rows from 1, or a share such as 0.1"),
        ({"path": "a", "rows": 1.5}, "data.rows: 1.5: must be a whole number of rows from 1, or a share such as 0.1"),
        ({"path": "a", "where": "level >"}, "data.where: 'level >': invalid syntax"),
    ],
)
def test_messages(data, part):
    assert message({**MINIMAL, "data": data}).startswith(part)


def test_rows_are_held_out_of_data_only():
    held_out = {**MINIMAL, "eval": {"rows": 5, "path": "b"}}
    assert message(held_out).startswith("eval: rows: 5 has no effect with path; remove one of the two")
    assert message({**MINIMAL, "eval": {"rows": 5, "prompt": "q"}}).startswith(
        "eval: prompt: q has no effect with rows"
    )


@pytest.mark.parametrize(
    ("held_out", "part"),
    [
        ({"sources": [{"path": "a"}], "rows": 5}, "eval: rows: 5 has no effect with sources; say it of each source"),
        ({"sources": [{"path": "x/a"}, {"path": "a"}]}, "eval: sources.1.source: 'a' is also the name of sources.0"),
        (
            {"sources": [{"path": "a", "weight": 2}]},
            "eval: sources.0.weight: 2.0 has no effect in eval: every prompt",
        ),
        (
            {"sources": [{"path": "a", "system_prompt": "b"}]},
            "eval: sources.0.system_prompt: 'b' has no effect",
        ),
    ],
)
def test_held_out_sources_are_checked(held_out, part):
    assert message({**MINIMAL, "eval": held_out}).startswith(part)


def test_the_first_example_of_the_docs(folder):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    config, code = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("yaml", "python"))
    (folder / "rows.py").write_text(code)
    write_jsonl(
        folder / "gsm8k.jsonl", [{"question": f"{i}?", "answer": f"So <<1+1=2>>\n#### {i},000"} for i in range(300)]
    )
    sections = yaml.safe_load(config.replace("openai/gsm8k, name: main", "gsm8k.jsonl"))
    found = read_all(folder, **sections)
    assert (len(found.train), len(found.held_out)) == (100, 200)
    assert all(row["answer"] == row["question"][:-1] + ",000" for row in found.train)
