"""Rows of data that stay on disk: columns are read when they are asked for, some rows at a time."""

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import xxhash

from cohort.data.cache import cached_table, content_key
from cohort.errors import UserError, describe_error
from cohort.records import IntArray

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
# Called with the name of something that takes long, how much of it is done, and all of it. Equal numbers end it.
OnProgress = Callable[[str, float, float], None]
T = TypeVar("T")

_BATCH = 1024  # rows that are read or written at a time
_SPARSE = 16  # rows that are read for one that is wanted, rather than reading wanted ones one by one
_MOST_TEXT_COLUMNS = 100
_OTHERS = "others"  # the column with what is no text, as JSON
_REPORTED_EVERY = 64  # rows


def no_progress(name: str, done: float, total: float) -> None:
    """Tell nobody."""


def reporting(items: Iterable[T], tell: Callable[[int], None]) -> Iterator[T]:
    """Yield items, and tell now and then, and at the end, how many have been used."""
    num_done = 0
    tell(num_done)
    for num_done, item in enumerate(items, start=1):
        yield item
        if num_done % _REPORTED_EVERY == 0:
            tell(num_done)
    tell(num_done)


class StoredRows(Sequence[Row]):
    """Rows on disk, each a dict of columns.

    Iterating reads some rows at a time. `digest` identifies the content: two sets of rows with the same digest are
    equal. It is None where finding it would mean reading everything.
    """

    columns: tuple[str, ...]  # in the order in which the rows first have them
    digest: str | None
    sources: Sequence[tuple[str, int]] = ()  # of a mixture: name and end of each source, whose rows are neighbors

    @abstractmethod
    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """Return the values of a column in rows `start` to `stop`, None where a row lacks it."""

    def describe(self, index: int) -> str:
        """Return how messages name a row: by its number in the file."""
        return f"row {index + 1}"

    def source_of(self, index: int) -> str | None:
        """Return the name of a row's source; None if this is no mixture."""
        return next((name for name, end in self.sources if index < end), None)

    def values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column in all rows."""
        for start in range(0, len(self), _BATCH):
            yield from self.read(column, start, min(start + _BATCH, len(self)))

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """Return rows as dicts."""
        values = {column: self.read(column, start, stop) for column in self.columns}
        return [{column: of_column[i] for column, of_column in values.items()} for i in range(stop - start)]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "StoredRows": ...
    def __getitem__(self, index: int | slice) -> "Row | StoredRows":
        if isinstance(index, slice):
            return SelectedRows(self, np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.read_rows(index % len(self), index % len(self) + 1)[0]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            yield from self.read_rows(start, min(start + _BATCH, len(self)))


class SelectedRows(StoredRows):
    """Some rows of others."""

    def __init__(self, rows: StoredRows, indices: IntArray):
        """Select the rows `indices`, in this order; those of a mixture must be in its order."""
        self._rows = rows
        self._indices = indices
        self.columns = rows.columns
        self.digest = rows.digest and content_key(rows.digest, indices.tobytes())
        ends = np.searchsorted(indices, [end for _, end in rows.sources]).tolist()
        self.sources = tuple((name, end) for (name, _), end in zip(rows.sources, ends, strict=True))

    def __len__(self) -> int:
        return len(self._indices)

    def describe(self, index: int) -> str:
        """See `StoredRows`."""
        return self._rows.describe(int(self._indices[index]))

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        return self._read(lambda first, last: self._rows.read(column, first, last), start, stop)

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`."""
        return self._read(self._rows.read_rows, start, stop)

    def _read(self, read: Callable[[int, int], list[Any]], start: int, stop: int) -> list[Any]:
        """Read rows that are close to each other together."""
        chosen = self._indices[start:stop].tolist()
        if not chosen:
            return []
        first, last = min(chosen), max(chosen) + 1
        if last - first > _SPARSE * len(chosen):
            return [read(i, i + 1)[0] for i in chosen]
        found = read(first, last)
        return [found[i - first] for i in chosen]


class ListedRows(StoredRows):
    """Rows in memory."""

    digest = None

    def __init__(self, rows: Sequence[Row]):
        """Use `rows`."""
        self._rows = rows
        self.columns = tuple(columns_of(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        return [row.get(column) for row in self._rows[start:stop]]

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`. Rows have their own keys only."""
        return list(self._rows[start:stop])


class JoinedRows(StoredRows):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[StoredRows]):
        """Join the rows of `parts`."""
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts]).tolist()
        self.columns = tuple(dict.fromkeys(column for part in parts for column in part.columns))
        self.digest = None
        if any(part.digest for part in parts):  # large ones; those in memory are hashed
            self.digest = content_key(*(part.digest or _digest_of(part) for part in parts))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _parts_of(self, start: int, stop: int) -> Iterator[tuple[StoredRows, int, int]]:
        for part, end in zip(self._parts, self._ends, strict=True):
            begin = end - len(part)
            if start < end and stop > begin:
                yield part, max(start, begin) - begin, min(stop, end) - begin

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        found: list[Any] = []
        for part, first, last in self._parts_of(start, stop):
            found += part.read(column, first, last) if column in part.columns else [None] * (last - first)
        return found

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`. Rows have the keys of their own file."""
        return [row for part, first, last in self._parts_of(start, stop) for row in part.read_rows(first, last)]


def _digest_of(rows: StoredRows) -> str:
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


class ConvertedRows(StoredRows):
    """Rows of JSON or CSV, converted to Arrow: texts as such, everything else as JSON, so that no value changes."""

    def __init__(self, key: str | None, make: Callable[[], Iterator[Row]], *, note: Callable[[], str] = str):
        """Convert the rows that `make` yields, unless the cache has those of `key`. None: keep them in memory.

        `note` is called after the last row, and its result is kept with the rows.
        """
        table, metadata = cached_table(key, lambda sink: _convert(make(), sink, note))
        known = json.loads(metadata[b"columns"])
        self.note: str = known.get("note", "")
        self.columns = tuple(known["all"])
        self.digest = key
        self._texts = {name: table.column(str(n)) for n, name in enumerate(known["texts"])}
        self._in_others = frozenset(known["others"])
        self._others = table.column(_OTHERS)

    def __len__(self) -> int:
        return len(self._others)

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        values = _cut(self._texts[column], start, stop) if column in self._texts else [None] * (stop - start)
        if column in self._in_others:
            for i, others in enumerate(_cut(self._others, start, stop)):
                if values[i] is None and others is not None:
                    values[i] = json.loads(others).get(column)
        return values

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`. Rows have their own keys only."""
        texts = {name: _cut(values, start, stop) for name, values in self._texts.items()}
        others = [{} if text is None else json.loads(text) for text in _cut(self._others, start, stop)]
        return [
            {name: values[i] for name, values in texts.items() if values[i] is not None} | others[i]
            for i in range(stop - start)
        ]


def _cut(column: "pa.ChunkedArray", start: int, stop: int) -> list[Any]:
    found: list[Any] = column.slice(start, stop - start).to_pylist()
    return found


def _convert(rows: Iterator[Row], sink: Any, note: Callable[[], str]) -> None:
    """Write rows as an Arrow file. Which columns are stored as text is decided by the first rows."""
    import pyarrow as pa

    batch = list(islice(rows, _BATCH))
    texts = list(dict.fromkeys(name for row in batch for name, value in row.items() if type(value) is str))
    texts = texts[:_MOST_TEXT_COLUMNS]
    schema = pa.schema([*((str(n), pa.large_string()) for n in range(len(texts))), (_OTHERS, pa.large_string())])
    seen: dict[str, None] = {}
    in_others: dict[str, None] = {}
    with pa.ipc.new_file(sink, schema) as writer:
        while batch:
            for row in batch:
                seen.update(dict.fromkeys(row))
            try:
                arrays, others = _arrays(batch, texts, lambda value: type(value) is str)
            except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape, is no text for Arrow
                arrays, others = _arrays(batch, texts, _is_encodable)
            in_others.update(dict.fromkeys(name for row in others for name in row))
            as_json = pa.array([json.dumps(row) if row else None for row in others], pa.large_string())
            writer.write_batch(pa.record_batch([*arrays, as_json], schema=schema))
            batch = list(islice(rows, _BATCH))
        known = json.dumps({"all": list(seen), "texts": texts, "others": list(in_others), "note": note()})
        writer.write_batch(
            pa.record_batch([pa.array([], field.type) for field in schema], schema=schema),
            custom_metadata={"columns": known},
        )


def _arrays(
    rows: Sequence[Row], texts: Sequence[str], is_text: Callable[[Any], bool]
) -> tuple[list["pa.Array"], list[Row]]:
    """Return the text columns of rows, and what is left of each row."""
    import pyarrow as pa

    columns = [[value if is_text(value := row.get(name)) else None for row in rows] for name in texts]
    arrays = [pa.array(values, pa.large_string()) for values in columns]
    names = frozenset(texts)
    return arrays, [{k: v for k, v in row.items() if k not in names or not is_text(v)} for row in rows]


def _is_encodable(value: Any) -> bool:
    return type(value) is str and value.encode(errors="replace") == value.encode(errors="surrogatepass")


class ParquetRows(StoredRows):
    """Rows of a Parquet file. A column is converted to Arrow when it is first asked for."""

    def __init__(self, file: Path, field: str, *, digest: str, on_progress: OnProgress = no_progress):
        """Open a file.

        Args:
            file: path of the file.
            field: begins the messages of errors while columns are read.
            digest: identifies the content of the file.
            on_progress: called while a column is converted.

        Raises:
            OSError, pa.ArrowException: it is not Parquet.
        """
        import pyarrow.parquet as pq

        self._file = file
        self._field = field
        self._on_progress = on_progress
        self._state = file_state(file)
        self._parquet = pq.ParquetFile(file)
        self.columns = tuple(self._parquet.schema_arrow.names)
        self.digest: str = digest
        self._read: dict[str, Any] = {}

    def __len__(self) -> int:
        return int(self._parquet.metadata.num_rows)

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`.

        Raises:
            UserError: the file is damaged, or has changed since it was opened, or Python has no type for a value.
        """
        import pyarrow as pa

        try:
            if column not in self._read:
                key = content_key(self.digest, "column", column)
                self._read[column] = cached_table(key, lambda sink: self._convert(column, sink))[0].column(0)
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self._field}: is not a readable Parquet file: column {column!r}: {describe_error(error, 300)}"
            ) from error
        return _python_values(self._read[column].slice(start, stop - start), column, self._field)

    def _convert(self, column: str, sink: Any) -> None:
        import pyarrow as pa

        field = self._parquet.schema_arrow.field(column)
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        schema, name, num_done = pa.schema([pa.field(column, kind)]), f"converting {column} of {self._file.name}", 0
        self._on_progress(name, 0, len(self))
        with pa.ipc.new_file(sink, schema) as writer:
            for values in self._batches(column):
                writer.write_batch(pa.record_batch([values.cast(kind)], schema=schema))
                self._on_progress(name, num_done := num_done + len(values), len(self))
        if file_state(self._file) != self._state:
            raise UserError(f"{self._field}: the file has changed since the run started; start again")

    def _batches(self, column: str) -> Iterator["pa.Array"]:
        import pyarrow as pa

        try:
            for batch in self._parquet.iter_batches(_BATCH, columns=[column]):
                yield batch.column(batch.schema.get_field_index(column))
        except OSError as error:  # of the source, not of the cache
            raise pa.ArrowInvalid(str(error)) from error


def python_rows(table: "pa.Table", where: str) -> list[Row]:
    """Return the rows of an Arrow table.

    Raises:
        UserError: see `_python_values`.
    """
    columns = [_python_values(values, name, where) for name, values in zip(table.column_names, table, strict=True)]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _python_values(values: "pa.ChunkedArray", column: str, where: str) -> list[Any]:
    """Return the values of an Arrow column.

    Raises:
        UserError: Python has no type for one of them, such as a date after the year 9999.
    """
    import pyarrow as pa

    try:
        found: list[Any] = values.to_pylist()
        return found
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(
            f"{where}: column {column!r}, of type {values.type}, has a value that Python cannot hold: "
            f"{describe_error(error, 300)}; write the column as text or numbers"
        ) from error


class DatasetRows(StoredRows):
    """Rows of a `datasets.Dataset`, which maps its Arrow files into memory itself."""

    def __init__(self, dataset: Any, *, digest: str | None = None):
        """Use the rows of `dataset`."""
        self._dataset = dataset
        self._of_column: dict[str, Any] = {}
        self.columns = tuple(dataset.column_names)
        self.digest = digest

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        if column not in self._of_column:
            self._of_column[column] = self._dataset.select_columns([column])
        return list(self._of_column[column][start:stop][column])

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`."""
        return [self._dataset[i] for i in range(start, stop)]


class RowColumns(Mapping[str, Any]):
    """The columns of a row, each read when it is asked for."""

    __slots__ = ("_index", "_known", "_names", "_rows")

    def __init__(self, rows: Sequence[Mapping[str, Any]], index: int, names: Mapping[str, None]):
        """Row `index` of `rows`, which counts as having all columns `names`."""
        self._rows, self._index, self._names = rows, index, names
        self._known: Row = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            rows, i = self._rows, self._index
            self._known[name] = rows.read(name, i, i + 1)[0] if isinstance(rows, StoredRows) else rows[i].get(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[Row], tuple[Row]]:
        return dict, (dict(self),)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all rows' columns, in the order in which the rows first have them."""
    if isinstance(rows, StoredRows):
        return list(rows.columns)
    return list(dict.fromkeys(column for row in rows for column in row))


def values_of(rows: Sequence[Mapping[str, Any]], column: str) -> Iterable[Any]:
    """Return the values of a column, None where a row lacks it."""
    return rows.values(column) if isinstance(rows, StoredRows) else (row.get(column) for row in rows)


def describe_row(rows: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return how messages name a row."""
    return rows.describe(index) if isinstance(rows, StoredRows) else f"row {index + 1}"


def file_state(file: Path) -> tuple[int, ...]:
    """Return what changes when a file is written."""
    state = os.stat(file)
    return state.st_size, state.st_mtime_ns, state.st_ino
