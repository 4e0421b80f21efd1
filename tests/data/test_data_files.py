"""Files, folders and ids to rows."""

import csv
import json
from contextlib import chdir
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cohort.data import open_stream
from cohort.errors import UserError
from data_files import ROWS, read


def refusal(folder: Path, path: str, **options: str) -> str:
    with pytest.raises(UserError) as error:
        read(folder, path, **options)
    message = str(error.value)
    assert message.startswith(f"data.path={path!r}: ")
    return message


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# Files


def write_file(file: Path) -> None:
    """Writes ROWS in the format that the ending names."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif file.suffix == ".json":
        file.write_text(json.dumps(ROWS, indent=2))
    else:
        file.write_text(lines(*ROWS))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.parquet", "a.csv"])
def test_every_file_format_gives_the_same_rows(tmp_path, name):
    write_file(tmp_path / name)
    assert read(tmp_path, name) == ROWS
    assert read(Path("/"), str(tmp_path / name)) == ROWS


def test_json_lines_skip_blank_lines_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n  \n{"prompt": "c", "level": 2}'
    )
    assert read(tmp_path, "a.jsonl") == [{"prompt": "a\u2028b"}, {"prompt": "c", "level": 2}]


@pytest.mark.parametrize(
    "text", ['{"prompt": "a"}\n{"prompt": "b"}\n', '\n\ufeff\n [{"prompt": "a"}, {"prompt": "b"}]']
)
def test_json_is_lines_or_an_array(tmp_path, text):
    (tmp_path / "a.json").write_text(text.replace("\n\ufeff", "\ufeff\n"))
    assert read(tmp_path, "a.json") == [{"prompt": "a"}, {"prompt": "b"}]


def test_csv_values_stay_strings(tmp_path):
    long_text = "x" * 200_000
    (tmp_path / "a.csv").write_text(
        f'prompt,answer,note\n"a, ""b""\nc",007,\n\n{long_text},1e3,NA\n', encoding="utf-8-sig"
    )
    csv.field_size_limit(131_072)
    assert read(tmp_path, "a.csv") == [
        {"prompt": 'a, "b"\nc', "answer": "007", "note": ""},
        {"prompt": long_text, "answer": "1e3", "note": "NA"},
    ]
    assert csv.field_size_limit() == 131_072


def test_missing_file_names_similar_files(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(*ROWS))
    message = refusal(tmp_path, "trian.jsonl")
    assert f"no such file in the folder {tmp_path}; did you mean train.jsonl?" in message
    assert "Data files there: train.jsonl" in refusal(tmp_path, "questions.parquet")
    assert f"the folder {tmp_path / 'gone'} does not exist" in refusal(tmp_path, "gone/train.jsonl")
    assert "no such file" in refusal(tmp_path, "./folder/of/files")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", b"", ["the file is empty (0 bytes)"]),
        ("a.jsonl", b"\n \n", ["has no rows"]),
        ("a.json", b"[]", ["has no rows"]),
        ("a.csv", b"prompt,answer\n", ["has no rows"]),
        (
            "a.jsonl",
            b'{"p": 1}\n\n{"p": 2,, "q": 3}\n',
            ["line 3 is not valid JSON", "character 9", '{"p": 2,, "q": 3}'],
        ),
        ("a.json", b'[{"p": 1},\n {"p": }]', ["the file is not valid JSON", "line 2, character 8", '{"p": }']),
        ("a.json", b'{\n "data": []\n}', ["line 1 is not valid JSON", "one array of objects"]),
        ("a.jsonl", b'{"p": 1}\n["p", 2]\n', ['line 2 holds ["p", 2], which is not an object', '{"prompt":']),
        ("a.json", b'[{"p": 1}, "p"]', ['element 2 holds "p", which is not an object']),
        ("a.jsonl", '{"p": "é"}'.encode("latin-1"), ["line 1 is not UTF-8 text (byte 8)"]),
        ("a.jsonl", b"[" * 100_000, ["line 1 cannot be read as JSON"]),
        ("a.jsonl", b'{"p": 1}\n{"p": 1, "p": 2}\n', ["line 2 cannot be read as JSON: duplicate key 'p'"]),
        ("a.csv", b"p,q\n1,2\n\n1,2,3\n", ["line 4 has 3 values", "names 2 columns (p, q)", "double quotes"]),
        ("a.csv", b'p,q\n1,"2', ["line 2 is not valid CSV"]),
        ("a.csv", b"p,p\n1,2\n", ["names the column 'p' more than once"]),
        ("a.csv", b"p\n\xff\xfe\n", ["not UTF-8"]),
        ("a.parquet", b"PAR1 this is not Parquet", ["not a readable Parquet file"]),
        ("a.txt", b"hello", ["the ending '.txt' is not supported", ".jsonl, .ndjson, .json, .parquet, .csv"]),
        ("a.tar", b"hello", ["the ending '.tar' is not supported"]),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path, name)
    for part in parts:
        assert part in message


def test_parquet_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "has no rows" in refusal(tmp_path, "a.parquet")


def test_options_without_effect_are_refused_for_files(tmp_path):
    write_file(tmp_path / "a.jsonl")
    assert read(tmp_path, "a.jsonl", split="test") == ROWS  # the default of the evaluation's split
    assert "split='validation' has no effect" in refusal(tmp_path, "a.jsonl", split="validation")
    assert "name='main' has no effect" in refusal(tmp_path, "a.jsonl", name="main")
    assert "is empty; use a .jsonl" in refusal(tmp_path, "")


# Folders and ids


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    """`datasets` copies what it reads into its cache: keep that out of the home folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "cache")


def test_folder_saved_by_datasets(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(tmp_path, "one") == ROWS
    assert read(tmp_path, "two") == ROWS
    assert read(tmp_path, "two", split="test") == ROWS[1:]
    assert "has no split 'dev'. Splits: train, test" in refusal(tmp_path, "two", split="dev")
    assert "split='dev' has no effect" in refusal(tmp_path, "one", split="dev")
    assert "name='main' has no effect" in refusal(tmp_path, "one", name="main")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    assert "cannot be read" in refusal(tmp_path, "one")


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl", ".json"])
def test_folder_of_data_files(tmp_path, ending):
    folder = tmp_path / "questions"
    folder.mkdir()
    write_file(folder / f"train-0{ending}")
    write_file(folder / f"train-1{ending}")
    write_file(folder / f"test{ending}")
    assert read(tmp_path, "questions") == ROWS + ROWS
    assert read(tmp_path, "questions", split="test") == ROWS
    assert "has no split 'dev'. Splits: train, test" in refusal(tmp_path, "questions", split="dev")


def test_folder_of_other_files_and_slices(tmp_path):
    text, questions, table = tmp_path / "text", tmp_path / "questions", tmp_path / "table"
    for folder in (text, questions, table):
        folder.mkdir()
    (text / "train.txt").write_text("one\ntwo\n")
    write_file(questions / "train.jsonl")
    write_file(table / "train.csv")
    assert read(tmp_path, "text") == [{"text": "one"}, {"text": "two"}]
    assert read(tmp_path, "questions", split="train[1:]") == ROWS[1:]
    assert "slices of CSV folders (split='train[1:]') are not supported" in refusal(
        tmp_path, "table", split="train[1:]"
    )


def test_broken_folders_say_what_is_wrong(tmp_path):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert "use a folder of .jsonl" in refusal(tmp_path, "empty")
    assert "file 'train.jsonl': line 2 is not valid JSON" in refusal(tmp_path, "broken")
    assert "'main' not found" in refusal(tmp_path, "broken", name="main")


def test_hub_id(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path: str, *, name: str | None, split: str, streaming: bool) -> datasets.Dataset:
        asked.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub\nTraceback ...")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(tmp_path, "openai/gsm8k", name="main", split="test") == ROWS
    assert read(tmp_path, "user/math-v1.5") == ROWS
    assert asked == [("openai/gsm8k", "main", "test"), ("user/math-v1.5", None, "train")]
    message = refusal(tmp_path, "nobody/nothing")
    assert "ConnectionError: Couldn't reach 'nobody/nothing' on the Hub; nor is it a file or folder here" in message
    with chdir(tmp_path), pytest.raises(UserError) as error:
        open_stream("nobody/nothing", field="data.path", split="train", name=None)
    assert str(error.value) == message.replace("load_dataset with name", "load_dataset with streaming=True, name")


def test_a_parquet_duration_that_python_cannot_hold_is_refused(tmp_path):
    table = pa.table({"prompt": ["a"], "took": pa.array([2**62], pa.duration("s"))})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=True)
    said = "column 'took', of type duration[s], has a value that Python cannot hold: OverflowError: "
    assert said in refusal(tmp_path, "a.parquet")


def test_the_root_of_the_file_system_is_no_data(tmp_path):
    assert "is the root of the file system; use a .jsonl" in refusal(tmp_path, "/")


@pytest.mark.parametrize("path", ["x" * 5000, "x" * 300 + ".jsonl", "x/" * 4000 + "y.csv"])
def test_a_name_longer_than_the_system_allows(tmp_path, path):
    with pytest.raises(UserError) as error:
        read(tmp_path, path)
    assert str(error.value) == f"data.path='{path[:299]}: cannot be read: File name too long"
