"""Read rows, each a dict of columns, from a path or a Hugging Face dataset id.

Supported: `.jsonl`, `.ndjson`, `.json`, `.parquet` and `.csv` files; a folder written by `datasets.save_to_disk`; a
folder of data files; a dataset id on the Hugging Face Hub. Small data are read into memory; large data stay on disk, as
they are or converted once into the user's cache.
"""

import csv
import errno
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from cohort.config.objects import NamedObject, is_unnamed
from cohort.config.section import expand_home
from cohort.data.cache import content_key
from cohort.data.rows import (
    ConvertedRows,
    DatasetRows,
    JoinedRows,
    OnProgress,
    ParquetRows,
    Row,
    StoredRows,
    file_state,
    no_progress,
    python_rows,
    reporting,
)
from cohort.errors import UserError, describe_error, did_you_mean, suggest

Rows = list[Row] | StoredRows

# Defaults of `data.split` and `eval.split`: allowed for data without splits.
_DEFAULT_SPLITS = ("train", "test")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# A missing path with one of these endings is meant as a file: asking the Hub for it would only hide the typo.
_FILE_ENDINGS = {".arrow", ".bz2", ".feather", ".gz", ".parq", ".pkl", ".tsv", ".txt", ".xlsx", ".yaml", ".yml", ".zip"}
_CSV_FIELD_BYTES = 2**31 - 1
_IN_MEMORY_BYTES = 32 << 20  # of data that are not worth a copy in the cache
_MOST_FILES = 20_000  # in a folder of data files; `datasets` would look at each


class _UnreadableError(Exception):
    """Describes what is wrong with the data; `read_rows` adds the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """How messages name a file, and how its progress is told."""

    where: str  # begins the messages of errors in columns of Parquet that are read later
    name: str  # of the file, or of the folder of which it is one
    before: int = 0  # bytes of the folder's files before it
    total: int  # bytes of all of them
    on_progress: OnProgress

    def tell(self, doing: str, num_bytes: int) -> None:
        """Report that bytes of this file are done."""
        self.on_progress(f"{doing} {self.name} (MB)", (self.before + num_bytes) / 1e6, self.total / 1e6)


def read_rows(
    path: str, *, field: str, split: str = "train", name: str | None = None, on_progress: OnProgress = no_progress
) -> Rows:
    """Return the rows of the data at `path`, in file order, each a dict from column name to value.

    They are checked from the first to the last, and only small data are a list. Columns of large Parquet files are
    read, and found damaged, when they are asked for.

    A path that does not exist is taken as an id on the Hugging Face Hub. `field` is the configuration key named in
    messages, and `on_progress` is called while large files are read or converted.

    - JSON lines (`.jsonl`, `.ndjson`; `.json` too, which may also be one array): one object per line; blank lines are
      skipped. Rows may have different keys.
    - CSV: UTF-8, comma-separated; the first line names the columns. **Values stay strings**, so that the answer "007"
      does not become 7; an empty cell is "".
    - Folder: written by `datasets.save_to_disk`, or data files, assigned to splits by name as `datasets.load_dataset`
      does.
      `split` selects the split, `name` the configuration declared in the folder's card.
    - Hub id: `datasets.load_dataset(path, name, split=split)`, with the dataset's column types.

    Raises:
        UserError: the data is missing, empty, broken or of an unknown kind, or `name`, or a `split` other than "train"
            and "test", is given for data without them.
    """
    with _naming(where := f"{field}={path!r:.300}"):
        rows = _read(path, split, name, where, on_progress)
        if not rows:
            raise _UnreadableError("has no rows; at least one prompt is needed")
    return rows


def find_stream(path: str, *, field: str, split: str, name: str | None) -> Any:
    """Return the file at `path`, or the `datasets.IterableDataset` of the folder or the Hub id, of which rows are read
    later.

    Raises:
        UserError: the data is missing, or `name`, or a `split` other than "train" and "test", is given for a file.
    """
    with _naming(f"{field}={path!r:.300}"):
        found = _find(path, split, name)
        if found is None:
            return _read_hub(path, split, name, streaming=True)
        return _load_dataset(str(found), split, name, streaming=True) if found.is_dir() else found


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Begin the messages of errors with `where`, the field and the path."""
    try:
        yield
    except _UnreadableError as error:
        raise UserError(f"{where}: {error}") from error
    except PermissionError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}: {error.filename}") from error


def _read(path: str, split: str, name: str | None, where: str, on_progress: OnProgress) -> Rows:
    if isinstance(path, NamedObject):
        return _read_object(path.value)
    found = _find(path, split, name)
    if found is None:
        hub_rows: Rows = _read_hub(path, split, name)
        return hub_rows
    if found.is_dir():
        return _read_folder(found, split, name, where, on_progress)
    size = found.stat().st_size
    return _read_file(found, _Reading(where=where, name=found.name, total=size, on_progress=on_progress))


def _find(path: str, split: str, name: str | None) -> Path | None:
    """Return the file or folder at `path`; None if it is meant as a Hub id."""
    if is_unnamed(path):
        raise _UnreadableError("was a Python object when the run started; run it from Python again, or write a file")
    if not path.strip():
        raise _UnreadableError(f"is empty; use {_what_works()}")
    try:
        found = Path.cwd() / expand_home(path)
        found.stat()
    except ValueError as error:
        raise _UnreadableError(str(error)) from error
    except (FileNotFoundError, NotADirectoryError):
        if _is_meant_as_file(path):
            raise _UnreadableError(_missing(found)) from None
        return None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise _UnreadableError(f"cannot be read: {error.strerror}") from error
    if found.is_dir():
        if found.resolve() == Path(found.resolve().anchor):
            raise _UnreadableError(f"is the root of the file system; use {_what_works()}")
    elif split not in _DEFAULT_SPLITS or name is not None:
        option = f"name={name!r}" if name is not None else f"split={split!r}"
        raise _UnreadableError(f"is a single file, where {option} has no effect; leave it out, or use a folder or id")
    return found


def _read_object(rows: Iterable[Any]) -> Rows:
    if (datasets := sys.modules.get("datasets")) and isinstance(rows, datasets.Dataset):
        return _rows_of_dataset(rows)
    found = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise _UnreadableError(
                f'row {number} is {row!r:.60}, which is not a dict of columns, such as {{"prompt": "2 + 2 = ?"}}'
            )
        found.append(dict(row))
    return found


def _what_works() -> str:
    return f"a {', '.join(_READERS)} file, a folder of such files, or the id of a Hugging Face dataset"


def _is_meant_as_file(path: str) -> bool:
    suffix = Path(path).suffix.lower()
    return suffix in _READERS or suffix in _FILE_ENDINGS or not _HUB_ID.fullmatch(path)


def _missing(file: Path) -> str:
    """Say that there is no such file, with similarly named ones."""
    folder = file.parent.resolve()
    if not folder.is_dir():
        return f"no such file: the folder {folder} does not exist"
    siblings = sorted(entry.name for entry in folder.iterdir())
    usable = [name for name in siblings if Path(name).suffix.lower() in _READERS]
    hint = did_you_mean(file.name, siblings) or f". Data files there: {', '.join(usable[:5]) or 'none'}"
    return f"no such file in the folder {folder}{hint}"


def _read_file(file: Path, reading: _Reading, *, is_part_of_large: bool = False) -> Rows:
    kind = file.suffix.lower()
    if kind not in _READERS:
        raise _UnreadableError(f"the ending {file.suffix!r} is not supported; use {_what_works()}")
    try:
        if file.stat().st_size == 0:
            raise _UnreadableError("the file is empty (0 bytes)")
        is_large = is_part_of_large or file.stat().st_size > _IN_MEMORY_BYTES
        if (read := _READERS[kind]) is None:
            return _read_parquet(file, reading, is_large=is_large)
        if is_large:
            return _convert(file, read, reading)
        with file.open("rb") as opened:
            return list(read(opened))
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror or error}") from error


def read_file_rows(file: Path, where: str) -> Iterator[Row]:
    """Yield the rows of a file while it is parsed. `where` begins the messages of errors.

    Raises:
        UserError: the file is of an unknown kind, or broken at the next row.
    """
    kind = file.suffix.lower()
    try:
        if kind not in _READERS:
            raise _UnreadableError(f"the ending {file.suffix!r} is not supported; use {_what_works()}")
        read = _READERS[kind]
        if read is None:
            yield from _parquet_rows(file, where)
            return
        with file.open("rb") as opened:
            yield from read(opened)
    except (_UnreadableError, OSError) as error:
        raise UserError(f"{where}: {error}") from error


def _convert(file: Path, read: "_Reader", reading: _Reading) -> StoredRows:
    def rows_of_file() -> Iterator[Row]:
        with file.open("rb") as opened:
            yield from reporting(read(opened), lambda _: reading.tell("converting", opened.tell()))

    before = file_state(file)
    key = content_key(file, file.suffix.lower(), on_bytes=partial(reading.tell, "reading"))
    rows = ConvertedRows(key, rows_of_file)
    if file_state(file) != before:
        raise _UnreadableError("the file has changed while it was read; start again when it is complete")
    return rows


# JSON


def _json_lines(lines: BinaryIO) -> Iterator[Row]:
    """Yield one object per line. Splits at line feeds only: JSON strings may hold other Unicode line breaks."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"line {number}"
            yield _require_object(_parse_json(line, where), where)


def _json(file: BinaryIO) -> Iterator[Row]:
    """Yield the objects of an array, or one object per line."""
    start = next((line.strip() for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    file.seek(0)
    if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _json_lines(file)
        return
    for number, value in enumerate(_parse_json(file.read(), "the file"), start=1):
        yield _require_object(value, f"element {number}")


def _parse_json(data: bytes, where: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"{where} is not UTF-8 text (byte {error.start + 1}); save the file as UTF-8") from error
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - 40) : error.pos + 40].strip()
        at = f"line {error.lineno}, character {error.colno}" if where == "the file" else f"character {error.colno}"
        raise _UnreadableError(
            f"{where} is not valid JSON: {error.msg.removesuffix(' at')} at {at}, near {excerpt!r}; "
            "write one JSON object per line, or, in a .json file, one array of objects"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        raise _UnreadableError(f"{where} cannot be read as JSON: {error}") from error


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, rejecting duplicate keys, which `json` would drop silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {key!r}")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of_pairs)


def _require_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise _UnreadableError(
            f"{where} holds {json.dumps(value, ensure_ascii=False):.60}, which is not an object; "
            'a row is an object of columns, such as {"prompt": "2 + 2 = ?", "answer": "4"}'
        )
    return value


# CSV and Parquet


def _csv(file: BinaryIO) -> Iterator[Row]:
    """Yield rows of strings; the `csv` module infers no types."""
    # Long prompts exceed the module's 128 KiB limit, which is global: restore it afterwards.
    previous_limit = csv.field_size_limit(_CSV_FIELD_BYTES)
    lines = TextIOWrapper(file, newline="", encoding="utf-8-sig")
    reader = csv.reader(lines, strict=True)
    try:
        yield from _csv_rows(reader)
    except csv.Error as error:
        raise _UnreadableError(f"line {reader.line_num} is not valid CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise _UnreadableError("the file is not UTF-8 text; save the file as UTF-8") from error
    finally:
        csv.field_size_limit(previous_limit)
        lines.detach()  # it would close the file


def _csv_rows(reader: Any) -> Iterator[Row]:
    header: list[str] = next((record for record in reader if record), [])
    _refuse_repeated(header)
    for record in reader:
        if not record:  # a blank line
            continue
        if len(record) != len(header):
            raise _UnreadableError(
                f"line {reader.line_num} has {len(record)} values, but the first line names {len(header)} columns "
                f"({', '.join(header)}); put values with commas or line breaks in double quotes"
            )
        yield dict(zip(header, record, strict=True))


def _read_parquet(file: Path, reading: _Reading, *, is_large: bool) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            _refuse_repeated(parquet.schema_arrow.names)
            groups = (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups))
            if not is_large and sum(group.total_byte_size for group in groups) <= _IN_MEMORY_BYTES:
                table = parquet.read()
            else:
                digest = content_key(file, on_bytes=partial(reading.tell, "reading"))
                return ParquetRows(file, reading.where, digest=digest, on_progress=reading.on_progress)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise _UnreadableError(f"is not a readable Parquet file: {describe_error(error, 300)}") from error
    return python_rows(table, reading.where)


def _parquet_rows(file: Path, where: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            _refuse_repeated(parquet.schema_arrow.names)
            for batch in parquet.iter_batches():
                yield from python_rows(pa.Table.from_batches([batch]), where)
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise _UnreadableError(f"is not a readable Parquet file: {describe_error(error, 300)}") from error


def _refuse_repeated(columns: Iterable[str]) -> None:
    repeated = [column for column, count in Counter(columns).items() if count > 1]
    if repeated:
        raise _UnreadableError(f"names the column {repeated[0]!r} more than once; give every column its own name")


_Reader = Callable[[BinaryIO], Iterator[Row]]
# None: Parquet, whose columns can be read on their own
_READERS: Mapping[str, _Reader | None] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": None,
    ".csv": _csv,
}

# Folders and the Hub


def _read_folder(folder: Path, split: str, name: str | None, where: str, on_progress: OnProgress) -> Rows:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _read_saved(folder, split, name)
    import datasets

    if (number := sum(1 for _ in islice(folder.rglob("*"), _MOST_FILES + 1))) > _MOST_FILES:
        raise _UnreadableError(
            f"the folder {folder} has more than {number - 1:,} files; use the one that holds the data"
        )
    try:
        files = datasets.load_dataset_builder(str(folder), name=name).config.data_files
    except Exception as error:  # whatever `datasets` finds wrong with the folder is a user error
        raise _UnreadableError(
            f"the folder {folder} cannot be read: {describe_error(error, 300)}; use a folder of {', '.join(_READERS)} "
            "files, or one written by datasets.save_to_disk"
        ) from error
    files_per_split = {str(key): [Path(file) for file in value] for key, value in (files or {}).items()}
    chosen = files_per_split.get(split)
    if chosen is None and (not files_per_split or "[" not in split):
        raise _UnreadableError(_no_split(split, files_per_split))
    # Formats known above are read here, and `datasets` only assigns files to splits: it would turn "007" into 7 and
    # give every row the keys of all others. It reads the rest: other formats, and slices such as train[:100].
    if chosen is not None and all(file.suffix.lower() in _READERS for file in chosen):
        return _read_members(chosen, folder, where, on_progress)
    if any(file.suffix.lower() == ".csv" for member in files_per_split.values() for file in member):
        raise _UnreadableError(f"slices of CSV folders (split={split!r}) are not supported; use a whole split")
    return _load_dataset(str(folder), split, name)


def _read_members(files: Sequence[Path], folder: Path, where: str, on_progress: OnProgress) -> Rows:
    """Read files and join their rows. If one file is large, all are read as large ones."""
    ends = [*accumulate((file.stat().st_size for file in files), initial=0)]
    plain = _Reading(where=where, name=folder.name, total=ends[-1], on_progress=on_progress)
    readings = [replace(plain, before=before) for before in ends[:-1]]
    is_large = plain.total > _IN_MEMORY_BYTES
    parts = [_read_member(file, folder, reading, is_large) for file, reading in zip(files, readings, strict=True)]
    if any(isinstance(part, StoredRows) for part in parts):  # compressed Parquet may be larger than its file
        parts = [
            part if isinstance(part, StoredRows) else _read_member(file, folder, reading, is_large=True)
            for file, reading, part in zip(files, readings, parts, strict=True)
        ]
        return JoinedRows([part for part in parts if isinstance(part, StoredRows)])
    return [row for part in parts for row in part]


def _read_member(file: Path, folder: Path, reading: _Reading, is_large: bool) -> Rows:
    shown = file.relative_to(folder) if file.is_relative_to(folder) else file
    try:
        where = f"{reading.where}: file {str(shown)!r}"
        return _read_file(file, replace(reading, where=where), is_part_of_large=is_large)
    except _UnreadableError as error:
        raise _UnreadableError(f"file {str(shown)!r}: {error}") from error


def _read_saved(folder: Path, split: str, name: str | None) -> Rows:
    """Read what `datasets.save_to_disk` wrote: one dataset, or one per split."""
    import datasets

    if name is not None:
        raise _UnreadableError(f"was written by datasets.save_to_disk, where name={name!r} has no effect; leave it out")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # a missing or broken file among those that `datasets` wrote
        raise _UnreadableError(f"the folder {folder} cannot be read: {describe_error(error, 300)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise _UnreadableError(_no_split(split, saved))
        saved = saved[split]
    elif split not in (*_DEFAULT_SPLITS, str(saved.split)):
        raise _UnreadableError(f"holds one dataset without splits, where split={split!r} has no effect; leave it out")
    return _rows_of_dataset(saved, is_read_here=True)


def _read_hub(path: str, split: str, name: str | None, *, streaming: bool = False) -> Any:
    try:
        return _load_dataset(path, split, name, streaming=streaming)
    except _UnreadableError as error:
        here = _missing(Path.cwd() / expand_home(path))
        raise _UnreadableError(f"{error}; nor is it a file or folder here: {here}") from error


def _load_dataset(path: str, split: str, name: str | None, *, streaming: bool = False) -> Any:
    """Return rows, or an `IterableDataset` of them."""
    import datasets

    try:
        dataset = datasets.load_dataset(path, name=name, split=split, streaming=streaming)
        return dataset if streaming else _rows_of_dataset(dataset, is_read_here=True)
    except Exception as error:  # network, access, unknown name or split, broken file: all user errors
        how = "streaming=True, " if streaming else ""
        raise _UnreadableError(
            f"datasets.load_dataset with {how}name={name!r} and split={split!r} failed: {describe_error(error, 300)}"
        ) from error


def _rows_of_dataset(dataset: Any, *, is_read_here: bool = False) -> Rows:
    """Return the rows of a dataset. One that is read here is what its files hold, which identify it."""
    if dataset.data.nbytes <= _IN_MEMORY_BYTES:
        return list(dataset)
    files = [Path(file["filename"]) for file in dataset.cache_files]
    known = is_read_here and files and getattr(dataset, "_indices", None) is None
    return DatasetRows(dataset, digest=content_key(*files, str(dataset.split), str(len(dataset))) if known else None)


def _no_split(split: str, available: Iterable[str]) -> str:
    return f"has no split {split!r}{suggest(split, available, 'Splits')}"
