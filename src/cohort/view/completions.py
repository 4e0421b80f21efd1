"""Read Parquet files of a run by column and range of rows: completions/ and tokens/.

A file may be missing, cut short, of an older version or damaged. What cannot be read is null, and `problems` says why.
Files are not memory-mapped: one that shrinks while it is read must not kill the process.
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cohort.view.paths import inside

KINDS = ("step", "replaced", "dropped", "eval")
_FILE = re.compile(rf"({'|'.join(KINDS)})-([0-9]{{1,15}})\.parquet")
_BATCH_BYTES = 32 << 20  # of one column, decoded at a time
_MAX_BATCH_ROWS = 1024
MAX_ROWS_PER_BYTE = 8  # more is a damaged file
_DICTIONARIES = ("prompt", "finish_reason", "end")  # texts that repeat

Signature = tuple[int, int, int]  # inode, mtime in nanoseconds, size in bytes
T = TypeVar("T")


def steps_on_disk(run_path: Path) -> dict[int, tuple[str, ...]]:
    """Return the kinds of completions files by step, in ascending order of steps, from file names alone."""
    found: dict[int, list[str]] = {}
    try:
        names = os.listdir(inside(run_path, "completions"))
    except OSError:
        return {}
    for name in names:
        if match := _FILE.fullmatch(name):
            found.setdefault(int(match[2]), []).append(match[1])
    return {step: tuple(sorted(found[step], key=KINDS.index)) for step in sorted(found)}


def completions_name(kind: str, step: int) -> str:
    """Return a completions file's name within the run folder."""
    return f"completions/{kind}-{step:06d}.parquet"


def signature(path: Path) -> Signature | None:
    """Return what changes if a file is replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class FileCache(Generic[T]):
    """What was computed from files, for as long as they do not change. Keeps those used last; thread-safe."""

    def __init__(self, size: int, weigh: Callable[[T], int] = lambda value: 1):
        """Create a cache of values that weigh at most `size` together, or one that weighs more."""
        self._size = size
        self._weigh = weigh
        self._total = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Any, tuple[Signature | None, T]] = OrderedDict()

    def get(self, path: Path, compute: Callable[[], T], *, key: Any = None) -> T:
        """Return the value for a file, and for `key` if one file has several."""
        now = signature(path)
        if (known := self.peek(path, key=key)) is not None:
            return known
        value = compute()
        with self._lock:
            if (old := self._values.pop((path, key), None)) is not None:
                self._total -= self._weigh(old[1])
            self._values[path, key] = now, value
            self._total += self._weigh(value)
            while self._total > self._size and len(self._values) > 1:
                _, (_, dropped) = self._values.popitem(last=False)
                self._total -= self._weigh(dropped)
        return value

    def peek(self, path: Path, *, key: Any = None) -> T | None:
        """Return the value for a file if it is known and the file has not changed."""
        now = signature(path)
        with self._lock:
            found = self._values.get((path, key))
            if found is None or found[0] != now:
                return None
            self._values.move_to_end((path, key))
            return found[1]


class ParquetRows:
    """A Parquet file of a run.

    Attributes:
        name: path of the file within the run folder.
        names: columns of the file.
        num_rows: rows of the file; 0 if it cannot be read.
        problems: sentences on what could not be read, added to by `read`.
    """

    def __init__(self, run_path: Path, name: str):
        self.names: tuple[str, ...] = ()
        self.num_rows = 0
        self.problems: list[str] = []
        self.name = name
        self._path = run_path / name
        self._row_groups: list[tuple[range, int]] = []  # rows, bytes after decompression
        self._types: dict[str, pa.DataType] = {}
        try:
            self._path = inside(run_path, name)
            with pq.ParquetFile(self._path) as file:
                self.names = tuple(dict.fromkeys(file.schema_arrow.names))
                self._types = {field.name: _with_dictionary(field) for field in file.schema_arrow}
                start = 0
                for i in range(file.metadata.num_row_groups):
                    group = file.metadata.row_group(i)
                    self._row_groups.append((range(start, start + group.num_rows), group.total_byte_size))
                    start += group.num_rows
                if start > MAX_ROWS_PER_BYTE * self._path.stat().st_size:
                    raise ValueError(f"its {start:,} rows do not fit into its size")
                self.num_rows = start
        except FileNotFoundError:
            self.problems.append(f"{name} does not exist.")
        except PermissionError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}.")
        except Exception as error:  # a damaged file can raise anything
            self.problems.append(_why_unreadable(self._path, name, error))

    def _open(self) -> pq.ParquetFile:
        dictionaries = [name for name, kind in self._types.items() if pa.types.is_dictionary(kind)]
        return pq.ParquetFile(self._path, read_dictionary=dictionaries)

    def read(self, columns: Sequence[str], rows: range | None = None) -> dict[str, pa.ChunkedArray]:
        """Read columns of a range of rows. Columns that the file does not have are missing from the result."""
        columns = [name for name in columns if name in self.names]
        rows = range(self.num_rows) if rows is None else range(max(0, rows.start), min(self.num_rows, rows.stop))
        chunks: dict[str, list[pa.Array]] = {name: [] for name in columns}
        for batch in self.batches(columns, rows):
            for name in columns:
                chunks[name].append(batch[name])
        return {
            name: pa.chunked_array(of_one) if of_one else pa.chunked_array([], type=self._types[name])
            for name, of_one in chunks.items()
        }

    def batches(self, columns: Sequence[str], rows: range) -> Iterator[dict[str, pa.Array]]:
        """Read columns of a range of rows in small batches, with nulls where a row group is damaged."""
        for i, (within, num_bytes) in enumerate(self._row_groups):
            wanted = range(max(rows.start, within.start), min(rows.stop, within.stop))
            if not wanted or not columns:
                continue
            local = range(wanted.start - within.start, wanted.stop - within.start)
            # rows before the wanted ones are decoded too: in large batches, or one late row would need hundreds
            batch_rows = max(1, min(_MAX_BATCH_ROWS, local.stop, _BATCH_BYTES * len(within) // max(1, num_bytes)))
            done = 0
            try:
                for batch in self._row_group(i, columns, local, batch_rows):
                    done += len(batch[columns[0]])
                    yield batch
            except GeneratorExit:
                raise
            except Exception as error:  # a damaged file can raise anything
                rest = range(local.start + done, local.stop)
                yield {name: self._column(i, name, rest, error) for name in columns}

    @staticmethod
    def values(array: pa.Array) -> list[Any]:
        """Return an array's values as Python objects; texts that are not UTF-8 with replacement characters."""
        try:
            return list(array.to_pylist())
        except UnicodeDecodeError:
            return list(texts(array, len(array)))

    def _row_group(self, i: int, columns: Sequence[str], rows: range, batch_rows: int) -> Iterator[dict[str, pa.Array]]:
        """Read rows of a row group, numbered from its start."""
        with self._open() as file:
            start = 0
            for batch in file.iter_batches(batch_rows, row_groups=[i], columns=list(columns)):
                first, last = max(rows.start - start, 0), min(rows.stop - start, len(batch))
                if first < last:
                    part = batch.slice(first, last - first)
                    yield {name: _checked(part.column(name)) for name in columns}
                start += len(batch)
                if start >= rows.stop:
                    return
            if start < rows.stop:
                raise EOFError(f"it has {start} rows of {rows.stop}")

    def _column(self, i: int, name: str, rows: range, error: Exception) -> pa.Array:
        """Read one column of a row group by itself, after reading several failed; nulls if it is this one."""
        try:
            read = [batch[name] for batch in self._row_group(i, [name], rows, len(rows))]
            return pa.concat_arrays(read)
        except Exception as own_error:
            detail = _first_line(own_error) or _first_line(error)
            self.problems.append(f"{self.name}: column {name!r} cannot be read: {detail}.")
            return pa.nulls(len(rows), self._types[name])


def _checked(array: pa.Array) -> pa.Array:
    """Check what pyarrow relies on but does not check: that the entries of a dictionary exist.

    Raises:
        ValueError: they do not.
    """
    if pa.types.is_dictionary(array.type):
        ends = pc.min_max(array.indices).as_py()
        if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(array.dictionary):
            raise ValueError("it refers to texts that do not exist")
    return array


def _with_dictionary(field: pa.Field) -> pa.DataType:
    """Return the type that a column is read as."""
    if field.name in _DICTIONARIES and pa.types.is_string(field.type):
        return pa.dictionary(pa.int32(), pa.string())
    return field.type


def _why_unreadable(path: Path, name: str, error: Exception) -> str:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            begins = file.read(4) == b"PAR1"
            file.seek(max(0, size - 4))
            ends = file.read(4) == b"PAR1"
    except OSError as why:
        return f"{name} cannot be read: {why.strerror or why}."
    if size == 0:
        return f"{name} is empty."
    if begins and not ends:
        return f"{name} is truncated."
    return f"{name} is damaged: {_first_line(error)}."


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def numbers(column: pa.ChunkedArray | None, length: int) -> NDArray[np.float64]:
    """Return a column's numbers, NaN where null, not a number or missing."""
    if column is None:
        return np.full(length, np.nan)
    try:
        return np.asarray(pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    except (pa.ArrowException, ValueError, TypeError):
        return np.array([_as_number(value) for value in column.to_pylist()], dtype=np.float64)


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return float("nan")


def list_lengths(column: pa.ChunkedArray | None, length: int) -> NDArray[np.float64]:
    """Return the lengths of a column's lists, NaN where null or missing."""
    if column is None:
        return np.full(length, np.nan)
    try:
        return numbers(pc.list_value_length(column), length)
    except (pa.ArrowException, TypeError):
        return np.full(length, np.nan)


def texts(column: pa.Array | pa.ChunkedArray | None, length: int, *, limit: int | None = None) -> list[str | None]:
    """Return a column's texts, at most `limit` characters of each, None where null or missing."""
    if column is None:
        return [None] * length
    if isinstance(column, pa.ChunkedArray):
        return [text for chunk in column.chunks for text in texts(chunk, len(chunk), limit=limit)]
    if pa.types.is_dictionary(column.type):  # each text once
        of_dictionary = texts(column.dictionary, len(column.dictionary), limit=limit)
        return [None if i is None else of_dictionary[i] for i in column.indices.to_pylist()]
    try:
        if limit is not None and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = pc.utf8_slice_codeunits(column, 0, limit)
        values = column.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError):  # not UTF-8
        values = pc.cast(column, pa.binary(), safe=False).to_pylist()
    return [as_text(value, limit=limit) for value in values]


def as_text(value: Any, *, limit: int | None = None) -> str | None:
    """Return a value of a column as text, at most `limit` characters of it."""
    if value is None:
        return None
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
    return text[:limit]
