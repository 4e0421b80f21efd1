"""Rows of a completions file, as a search reads them: only the columns and row groups that it needs."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cohort.run.completions import UPGRADED_FROM, upgrade
from cohort_view.completions import MAX_ROWS_PER_BYTE
from cohort_view.search.evaluate import BoolArray, Constant, Range, evaluate_leaf
from cohort_view.search.grammar import ColumnType, Leaf
from cohort_view.values import inside

_BATCH_BYTES = 16 << 20  # decoded text held at a time
_BUFFER_BYTES = 1 << 20  # read at a time of files larger than a batch
_IN_FILE = {"text": "completion", "length": "num_tokens"}


def facts_of_name(step: int, kind: str) -> Callable[[str], Constant | None]:
    """Return what a file's name says of the columns."""
    facts = {"step": Constant(float(step)), "kind": Constant(kind)}
    return facts.get


class CompletionsFile:
    """An open completions file. It stays readable if the run replaces or deletes it.

    Reads in the calling thread: files are small, and starting threads takes longer than reading.
    """

    def __init__(self, run_path: Path, name: str):
        """Open a file. It is not memory-mapped, since one that shrinks would kill the process.

        Args:
            run_path: the run folder.
            name: path of the Parquet file in it.
        """
        path = run_path / name
        if path.is_symlink() or path.parent.is_symlink():
            inside(run_path, name)
        size = path.stat().st_size
        self.parquet = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES if size > _BATCH_BYTES else 0)
        self._most_rows = MAX_ROWS_PER_BYTE * size
        self.names = frozenset(self.parquet.schema_arrow.names)

    def __enter__(self) -> "CompletionsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.parquet.close()

    def row_groups(self, column_type: Callable[[str], ColumnType], check: Callable[[], None]) -> Iterator["RowGroup"]:
        """Yield the row groups.

        Args:
            column_type: type of each column of the search, by name.
            check: called before each read of a row group, and may raise.
        """
        start = 0
        for index in range(self.parquet.metadata.num_row_groups):
            check()
            row_group = RowGroup(self, index, start, column_type, check)
            if start + row_group.num_rows > self._most_rows:
                raise ValueError(f"its {start + row_group.num_rows:,} rows do not fit into its size")
            yield row_group
            start += row_group.num_rows

    @cached_property
    def leaf_indices(self) -> dict[str, int]:
        """Index of each column of plain values among the Parquet file's leaves."""
        # not `parquet.schema`, which refers back to the footer: such cycles pile up by the thousand
        leaves = self.parquet.metadata.row_group(0)
        return {leaves.column(i).path_in_schema: i for i in range(leaves.num_columns)}

    def source(self, name: str) -> str | None:
        """Return the column of the file that a column of the search is read or follows from, None if there is none."""
        in_file = _IN_FILE.get(name, name)
        return next((column for column in (in_file, UPGRADED_FROM.get(in_file)) if column in self.names), None)

    def groups(self, group_size: int | None) -> Sequence[int | None]:
        """Return the number of each row's group; None in files without."""
        source = self.source("group")
        if source is None:
            return [None] * self.parquet.metadata.num_rows
        table = upgrade(self.parquet.read(columns=[source], use_threads=False), group_size)
        return table["group"].to_pylist()


class RowGroup:
    """A row group of a completions file. Columns are read when first needed."""

    def __init__(
        self,
        file: CompletionsFile,
        index: int,
        first_row: int,
        column_type: Callable[[str], ColumnType],
        check: Callable[[], None],
    ):
        self._file = file
        self._index = index
        self._column_type = column_type
        self._check = check
        self._metadata = file.parquet.metadata.row_group(index)
        self._columns: dict[str, pa.Array] = {}
        self.first_row = first_row
        self.num_rows: int = self._metadata.num_rows

    def facts(self, name: str) -> Constant | Range | None:
        """Return what the file's footer says of a column."""
        if self._file.source(name) is None:
            return Constant(None)
        index = self._file.leaf_indices.get(_IN_FILE.get(name, name))
        if index is None or self._column_type(name) != "number":
            return None
        statistics = self._metadata.column(index).statistics
        if statistics is None:
            return None
        if statistics.has_null_count and statistics.null_count == self.num_rows:
            return Constant(None)
        if statistics.has_min_max and isinstance(statistics.min, int | float):
            return Range(statistics.min, statistics.max)
        return None

    def leaf_rows(self, leaf: Leaf) -> BoolArray:
        """Return which rows a condition holds for."""
        parts = [evaluate_leaf(leaf, values) for values in self.batches(leaf.column)]
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    def values_at(self, name: str, rows: Sequence[int]) -> Iterator[pa.Scalar]:
        """Yield a column's values of some rows of the row group, in ascending order."""
        wanted = iter(rows)
        row = next(wanted, None)
        start = 0
        for values in self.batches(name):
            while row is not None and row < start + len(values):
                yield values[row - start]
                row = next(wanted, None)
            if row is None:
                return
            start += len(values)

    def batches(self, name: str) -> Iterator[pa.Array]:
        """Yield a column: float64 or strings, in one batch unless it takes much memory."""
        if name in self._columns:
            yield self._columns[name]
            return
        source = self._file.source(name)
        if source is None:
            yield pa.nulls(self.num_rows, pa.float64() if self._column_type(name) == "number" else pa.string())
            return
        num_bytes = self._metadata.total_byte_size
        if num_bytes <= _BATCH_BYTES:
            table = self._file.parquet.read_row_group(self._index, columns=[source], use_threads=False)
            self._columns[name] = self._logical(name, table)
            yield self._columns[name]
            return
        batch_rows = max(1, self.num_rows * _BATCH_BYTES // num_bytes)
        for batch in self._file.parquet.iter_batches(
            batch_rows, row_groups=[self._index], columns=[source], use_threads=False
        ):
            self._check()
            yield self._logical(name, pa.Table.from_batches([batch]))

    def _logical(self, name: str, table: pa.Table) -> pa.Array:
        in_file = _IN_FILE.get(name, name)
        column = (table if in_file in table.column_names else upgrade(table))[in_file]
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if self._column_type(name) == "number":
            return values.cast(pa.float64(), safe=False)
        return values if pa.types.is_large_string(values.type) else values.cast(pa.string())
