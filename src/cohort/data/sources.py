"""Read the training data as configured: one or several sources, renamed, filtered, mapped, drawn, and held out."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from cohort.config import Config
from cohort.config.data import SOURCE, DataConfig, SourceConfig
from cohort.config.objects import NamedObject
from cohort.config.user_code import error_location, is_user_code, load_function
from cohort.data.cache import cached_numbers, content_key
from cohort.data.files import Rows, read_rows
from cohort.data.rows import (
    ConvertedRows,
    JoinedRows,
    ListedRows,
    OnProgress,
    Row,
    SelectedRows,
    StoredRows,
    no_progress,
    reporting,
)
from cohort.errors import UserError, describe_error, did_you_mean, excerpt, suggest
from cohort.records import IntArray

if TYPE_CHECKING:
    from cohort.config.condition import Column

_NUMBER = "#row"  # hidden column of mapped rows: the number of the row that each was made of
_BATCH = 16384  # rows that a condition is evaluated for at a time
_HELD_OUT, _DRAWN = (0, 0, 3), (0, 0, 2)  # random streams, besides those of epochs (`order.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The rows to train on, and those that `eval.rows` holds out."""

    train: Rows
    held_out: Rows = field(default_factory=list)
    num_left_out: int = 0  # rows with the prompts of held-out ones


def read_training_rows(config: Config, *, on_progress: OnProgress = no_progress) -> TrainingRows:
    """Read the training data, and hold rows out of them. `on_progress` is called while that takes long.

    Raises:
        UserError: data are missing, empty or broken; a condition or a function cannot be used; or a number of rows is
            larger than there are.
    """
    data, seed = config.data, config.train.seed
    rows = _read_plain(data, "data", on_progress) if data.is_plain else _read_all(data, seed, on_progress)
    if config.eval is None or config.eval.rows is None:
        return TrainingRows(train=rows)
    optional = config.rollout.environment is not None or config.rollout.agent is not None
    return hold_out(_stored(rows), config.eval.rows, prompt=data.prompt, seed=seed, optional=optional)


def _read_plain(source: DataConfig | SourceConfig, field: str, on_progress: OnProgress) -> Rows:
    assert source.path is not None, "checked in the configuration"
    split, name = source.split, source.name
    return read_rows(source.path, field=f"{field}.path", split=split, name=name, on_progress=on_progress)


def _stored(rows: Rows) -> StoredRows:
    return rows if isinstance(rows, StoredRows) else ListedRows(rows)


def _read_all(data: DataConfig, seed: int, on_progress: OnProgress) -> StoredRows:
    if not data.sources:
        return _read_source(data, "data", seed, on_progress)
    options: dict[str, Any] = {"prompt": data.prompt, "seed": seed, "use": data.map, "on_progress": on_progress}
    return read_sources(data.sources, field="data.sources", **options)


def read_sources(
    sources: Sequence[SourceConfig],
    *,
    prompt: str,
    seed: int,
    field: str,
    use: str | None = None,
    on_progress: OnProgress = no_progress,
) -> "MixedRows":
    """Read the rows of several sources, one after the other.

    Args:
        sources: in their order.
        prompt: name that the columns with the prompt get.
        seed: of what is drawn.
        field: configuration key of the sources, for messages.
        use: function that maps the rows of sources without one of their own.
        on_progress: called while that takes long.

    Raises:
        UserError: as `read_training_rows`.
    """
    parts = []
    for i, source in enumerate(sources):
        rows = _read_source(source, f"{field}.{i}", seed, on_progress, use=source.map or use, number=i)
        parts.append(_Source(rows, source, prompt, f"{field}.{i}"))
    return MixedRows(parts, [source.label for source in sources])


def _read_source(
    source: DataConfig | SourceConfig,
    field: str,
    seed: int,
    on_progress: OnProgress,
    *,
    use: str | None = None,
    number: int = 0,
) -> StoredRows:
    """Read the rows of one source. `number`: of the source, for its random stream."""
    rows = _stored(_read_plain(source, field, on_progress))
    if source.columns:
        rows = RenamedRows(rows, source.columns, field=f"{field}.columns")
    if source.where is not None:
        rows = _where(rows, source.where, field=f"{field}.where")
    if (use := use or source.map) is not None:
        rows = _map(rows, use, field="data.map" if source.map is None else f"{field}.map", on_progress=on_progress)
    if source.rows is not None:
        chosen = _draw(len(rows), source.rows, stream=(seed, *_DRAWN, number), field=f"{field}.rows")
        rows = SelectedRows(rows, chosen)
    return rows


class RenamedRows(StoredRows):
    """Rows with other names of columns."""

    def __init__(self, rows: StoredRows, names: Mapping[str, str], *, field: str):
        """Rename columns, by old name.

        Raises:
            UserError: there is no such column, or two would have the same name.
        """
        for old in names:
            if old not in rows.columns:
                raise UserError(f"{field}: {old!r}: the data has no such column{suggest(old, rows.columns, 'Columns')}")
        self._rows = rows
        self._names = names
        self._old = {names.get(column, column): column for column in rows.columns}
        if len(self._old) < len(rows.columns):
            called = Counter(names.get(column, column) for column in rows.columns).most_common(1)[0][0]
            raise UserError(f"{field}: more than one column would be called {called!r}; rename the other one too")
        self.columns = tuple(self._old)
        self.digest = rows.digest and content_key(rows.digest, json.dumps(names, sort_keys=True))

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self, index: int) -> str:
        """See `StoredRows`."""
        return self._rows.describe(index)

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        return self._rows.read(self._old[column], start, stop)

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`. Rows have the keys that they had."""
        rename = self._names.get
        return [{rename(k, k): v for k, v in row.items()} for row in self._rows.read_rows(start, stop)]


class _Source(RenamedRows):
    """The rows of a source in a mixture: with its name in the column `source`, and the prompt where all have it."""

    def __init__(self, rows: StoredRows, source: SourceConfig, prompt: str, field: str):
        names = {source.prompt: prompt} if source.prompt not in (None, prompt) else {}
        if prompt in rows.columns and names:
            raise UserError(
                f"{field}.prompt: {source.prompt!r} is renamed to {prompt!r}, which is another column of this source; "
                f"rename that one too, such as {field}.columns: {{{prompt}: old_{prompt}}}, or set data.prompt"
            )
        super().__init__(rows, names, field=f"{field}.prompt")
        if SOURCE in self.columns:
            raise UserError(
                f"{field}: the data has a column {SOURCE!r}, which says what source of the mixture a row is of; rename "
                f"it: {field}.columns: {{{SOURCE}: origin}}"
            )
        self.columns = (*self.columns, SOURCE)
        self._label = source.label
        self._where = f"{field}.path={str(source.path)!r:.300}"
        self.digest = self.digest and content_key(self.digest, self._label)

    def describe(self, index: int) -> str:
        """See `StoredRows`."""
        return f"{super().describe(index)} of {self._where}"

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        return [self._label] * (stop - start) if column == SOURCE else super().read(column, start, stop)

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`."""
        return [{**row, SOURCE: self._label} for row in super().read_rows(start, stop)]


class MixedRows(JoinedRows):
    """The rows of several sources, one after the other."""

    def __init__(self, parts: Sequence[StoredRows], names: Sequence[str]):
        """Join the rows of sources."""
        super().__init__(parts)
        self.sources = tuple(zip(names, self._ends, strict=True))

    def describe(self, index: int) -> str:
        """See `StoredRows`. Rows are counted in their source."""
        part, row, _ = next(self._parts_of(index, index + 1))
        return part.describe(row)


# Conditions


class _Columns:
    """The columns of rows, as a condition may use them. Types are those of the values."""

    def __init__(self, rows: StoredRows):
        self._rows = rows
        self.used: dict[str, Column] = {}

    def find(self, name: str) -> "Column | None":
        """Return a column: numbers (true is 1), or text, as which lists and objects are written as JSON.

        Raises:
            ConditionError: it has both.
        """
        from cohort.config.condition import Column, ConditionError

        if name not in self._rows.columns:
            return None
        if name not in self.used:
            first: dict[bool, int] = {}  # is number -> row
            is_json = False
            for i, value in enumerate(self._rows.values(name)):
                if value is not None:
                    first.setdefault(isinstance(value, int | float), i)
                    is_json = is_json or isinstance(value, list | dict)
            if len(first) > 1:
                text, number = (self._rows.describe(first[kind]) for kind in (False, True))
                raise ConditionError(f"{name} is text in {text} and a number in {number}; make it one of the two")
            self.used[name] = Column(name, "number" if True in first else "text", is_json=is_json)
        return self.used[name]

    def names(self) -> Sequence[str]:
        """Return the names of all columns."""
        return self._rows.columns

    def expression(self, name: str) -> Any:
        """Return a column's values as an expression."""
        import pyarrow.dataset as ds

        return ds.field(name)


def _where(rows: StoredRows, where: str, *, field: str) -> StoredRows:
    """Return the rows of which a condition holds.

    Raises:
        UserError: it has no meaning for these columns, or holds for none.
    """
    key = rows.digest and content_key("where", rows.digest, where)
    chosen = cached_numbers(key, partial(_find_where, rows, where, field))
    if not len(chosen):
        raise UserError(f"{field}: {where!r} holds for none of {len(rows)} rows; at least one is needed")
    return SelectedRows(rows, chosen)


def _find_where(rows: StoredRows, where: str, field: str) -> IntArray:
    import pyarrow as pa

    from cohort.config.condition import TYPES, ConditionError, parse_condition

    columns = _Columns(rows)
    try:
        condition = parse_condition(where, columns)
    except ConditionError as error:
        at = f" at character {error.position + 1}" if error.position is not None else ""
        raise UserError(f"{field}: {where!r}{at}: {error}") from error
    chosen = []
    for start in range(0, len(rows), _BATCH):
        stop = min(start + _BATCH, len(rows))
        values = {
            name: pa.array([_as(column.type, v) for v in rows.read(name, start, stop)], TYPES[column.type])
            for name, column in columns.used.items()
        }
        table = pa.table({**values, _NUMBER: pa.array(np.arange(start, stop))})
        chosen.append(table.filter(condition.rows)[_NUMBER].to_numpy())
    return np.concatenate(chosen)


def _as(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "number":
        with suppress(OverflowError):
            return float(value)
        return np.inf if value > 0 else -np.inf
    text = json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
    return text.encode(errors="replace").decode()  # halves of surrogates are no text for Arrow


# Functions


class MappedRows(StoredRows):
    """What a function has made of rows."""

    def __init__(self, rows: StoredRows, made: StoredRows, *, digest: str | None):
        """`made` are the results for `rows`, each with the number of its row."""
        self._rows, self._made = rows, made
        self.columns = tuple(column for column in made.columns if column != _NUMBER)
        self.digest = digest

    def __len__(self) -> int:
        return len(self._made)

    def describe(self, index: int) -> str:
        """See `StoredRows`."""
        return self._rows.describe(self._made.read(_NUMBER, index, index + 1)[0])

    def read(self, column: str, start: int, stop: int) -> list[Any]:
        """See `StoredRows`."""
        return self._made.read(column, start, stop)

    def read_rows(self, start: int, stop: int) -> list[Row]:
        """See `StoredRows`."""
        return [{k: v for k, v in row.items() if k != _NUMBER} for row in self._made.read_rows(start, stop)]


def _map(rows: StoredRows, use: str, *, field: str, on_progress: OnProgress) -> StoredRows:
    """Call a function with each row, which is done once for the same rows and code.

    Raises:
        UserError: it cannot be loaded, fails for a row, returns neither a row nor None, or drops all rows.
    """
    function = load_function(use, field=field)
    code = [] if isinstance(use, NamedObject) else _code_of(use, function)  # an object may depend on anything
    key = content_key("results", rows.digest, use.rpartition(":")[2], *code) if rows.digest and code else None
    results = _Results(rows, function, f"{field}={use!r}", on_progress)
    made = ConvertedRows(key, lambda: iter(results), note=results.digest)
    if not len(made):
        raise UserError(f"{field}={use!r} returns None for each of {len(rows)} rows; at least one row is needed")
    return MappedRows(rows, made, digest=key and made.note)


def _code_of(use: str, function: Callable[..., Any]) -> list[Path]:
    """Return the file that `use` names, that of the function, which may come from elsewhere, and the files beside them
    that have been imported; none if they cannot be known.
    """
    where = use.rpartition(":")[0]
    module = getattr(function, "__module__", None) or type(function).__module__
    named = str(Path(where).resolve()) if where.endswith(".py") else _file_of(where)
    own = [file for file in dict.fromkeys((named, _file_of(module))) if file is not None and Path(file).is_file()]
    if named not in own:
        return []
    folders = tuple(str(Path(file).parent) + "/" for file in own if is_user_code(file))
    others = {file for name in list(sys.modules) if (file := _file_of(name)) is not None and file not in own}
    return [*map(Path, own), *(Path(f) for f in sorted(others) if f.startswith(folders) and is_user_code(f))]


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


class _Results:
    """What a function makes of rows."""

    def __init__(self, rows: StoredRows, function: Callable[[Row], Any], where: str, on_progress: OnProgress):
        """Call nothing yet. `where` begins the messages of errors: the field, and the function."""
        self._rows, self._function, self._where = rows, function, where
        self._on_progress = on_progress
        self._digest = xxhash.xxh3_128()

    def digest(self) -> str:
        """Identify the results by their content: a run resumes with the same rows, whatever has changed in the code."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Row]:
        self._digest.reset()
        for i, row in enumerate(reporting(self._rows, self._tell)):
            try:
                result = self._function(dict(row))
            except Exception as error:  # whatever the user's function does wrong
                raise UserError(f"{self._at(i)}: {describe_error(error)} (at {error_location(error)})") from error
            if result is None:
                continue
            if not isinstance(result, Mapping) or not all(isinstance(key, str) for key in result):
                raise UserError(
                    f"{self._at(i)}: returned {excerpt(result)}; return a dict of columns, or None to leave the row out"
                )
            made = {**result, _NUMBER: i}
            try:
                self._digest.update(_as_json(made))
            except (TypeError, ValueError) as error:
                column = next(name for name, value in result.items() if not _is_kept(value))
                raise UserError(
                    f"{self._at(i)}: returned {excerpt(result[column])} as {column!r}, which cannot be kept: "
                    f"{describe_error(error)}; return text, such as str(row[{column!r}]), or numbers, true, false, "
                    f"None, and lists and dicts of them, or leave the column out"
                ) from error
            yield made

    def _tell(self, num_done: int) -> None:
        self._on_progress(f"calling {self._where.partition('=')[0]}", num_done, len(self._rows))

    def _at(self, row: int) -> str:
        return f"{self._where}: {self._rows.describe(row)}"


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _is_kept(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        return bool(_as_json(value))
    return False


# Random choice


def _permutation(num: int, stream: Sequence[int]) -> IntArray:
    # the raw stream, which NumPy guarantees across releases
    return np.argsort(np.random.Philox(np.random.SeedSequence(stream)).random_raw(num), kind="stable")


def _number_of(wanted: int | float, num_rows: int, field: str) -> int:
    number = wanted if isinstance(wanted, int) else max(1, round(wanted * num_rows))
    if number > num_rows:
        raise UserError(f"{field}: {wanted} is more than the {num_rows} rows that there are; use at most {num_rows}")
    return number


def _draw(num_rows: int, wanted: int | float, *, stream: Sequence[int], field: str) -> IntArray:
    """Return the numbers of the rows that are drawn, in their order."""
    return np.sort(_permutation(num_rows, stream)[: _number_of(wanted, num_rows, field)])


def hold_out(rows: StoredRows, wanted: int | float, *, prompt: str, seed: int, optional: bool) -> TrainingRows:
    """Split rows into those to train on and those to hold out, which have other prompts.

    Of rows with the same prompt, at most one is held out, and none is trained on then. With `optional`, an environment
    may write the prompts: rows without one are the same if they are equal.

    Raises:
        UserError: there is no such column, or nothing would be left to train on.
    """
    if prompt not in rows.columns and not optional:
        raise UserError(f"data.prompt={prompt!r}: the data has no such column{did_you_mean(prompt, rows.columns)}")
    key = rows.digest and content_key("tasks", rows.digest, prompt)
    hashes = cached_numbers(key, lambda: np.fromiter(_hashes(rows, prompt), np.uint64, len(rows)).view(np.int64))
    order = _permutation(len(rows), (seed, *_HELD_OUT))
    number = _number_of(wanted, len(rows), "eval.rows")
    _, first = np.unique(hashes[order], return_index=True)  # of each prompt, in the order drawn
    held_out = np.sort(order[np.sort(first)[:number]])
    kept = np.flatnonzero(~np.isin(hashes, hashes[held_out]))
    if len(held_out) < number or not len(kept):
        most = len(first) - 1
        raise UserError(
            f"eval.rows: {wanted} leaves nothing to train on: of {len(rows)} rows, {len(first)} have different "
            f"prompts; use " + (f"at most {most}" if most else "more data")
        )
    return TrainingRows(
        train=SelectedRows(rows, kept),
        held_out=SelectedRows(rows, held_out),
        num_left_out=len(rows) - len(kept) - len(held_out),
    )


def _hashes(rows: StoredRows, prompt: str) -> Iterator[int]:
    """Yield a hash of each row's prompt; of the whole row if it has none, which an environment writes."""
    for start in range(0, len(rows), _BATCH):
        stop = min(start + _BATCH, len(rows))
        values = rows.read(prompt, start, stop) if prompt in rows.columns else [None] * (stop - start)
        whole = rows.read_rows(start, stop) if None in values else values
        for value, row in zip(values, whole, strict=True):
            what = row if value is None else value
            yield xxhash.xxh3_64_intdigest(json.dumps(what, sort_keys=True, default=str).encode())
