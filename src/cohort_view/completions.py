"""Read Parquet files of a run (completions/ and tokens/) by column and range of rows, and find its groups.

A file may be missing, cut short, of an older version or damaged. What cannot be read is null, and `problems` says why.
Files are not memory-mapped: one that shrinks while it is read must not kill the process.
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cohort.errors import describe_error
from cohort.records import BROKEN
from cohort.run.completions import UPGRADED_FROM, upgrade
from cohort_view.records import FloatArray
from cohort_view.values import inside, integer, number

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

    def read_upgraded(self, columns: Sequence[str], group_size: int | None = None) -> dict[str, pa.ChunkedArray]:
        """Read columns of all rows, also those that only newer versions write."""
        sources = [UPGRADED_FROM[name] for name in columns if name in UPGRADED_FROM and name not in self.names]
        found = self.read(list(dict.fromkeys([*columns, *sources])))
        if sources:
            try:
                table = upgrade(pa.table(found), group_size)
                return dict(zip(table.column_names, table.columns, strict=True))
            except Exception as error:  # a damaged file can raise anything
                self.problems.append(f"{self.name} of an older version cannot be read: {describe_error(error, 200)}.")
        return found

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
            detail = describe_error(own_error, 200)
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
    return f"{name} is damaged: {describe_error(error, 200)}."


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


PREVIEW_CHARS = 160
PROMPT_CHARS = 400
_EQUAL = 1e-8  # as in cohort.metrics
_CACHE_ROWS = 100_000  # of all files; about 300 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """A completions file. N rows, P groups; NaN and None where the file has no value."""

    num_rows: int
    groups: Sequence[range]  # [P] rows of each group
    prompt_ids: Sequence[Any]  # [P]
    prompts: Sequence[str]  # [P] beginnings
    are_chats: Sequence[bool]  # [P] whether the prompts are messages
    rewards: FloatArray  # [N]
    advantages: FloatArray  # [N]
    lengths: FloatArray  # [N] tokens sampled
    policy_versions: FloatArray  # [N]
    ends: Sequence[str | None]  # [N]
    previews: Sequence[str]  # [N] beginnings of the completions
    reward_names: Sequence[str]
    environment_names: Sequence[str]
    problems: Sequence[str]

    def intact_lengths(self, rows: range) -> FloatArray:
        """Return the lengths of the completions that infrastructure did not break, as in metrics of lengths."""
        return np.array([self.lengths[row] for row in rows if not is_broken(self.ends[row])], dtype=np.float64)

    def group_of(self, row: int) -> int:
        """Return the index of the group that has a row."""
        return next(i for i, rows in enumerate(self.groups) if row in rows)


_INDEXES: FileCache[StepIndex] = FileCache(_CACHE_ROWS, lambda index: index.num_rows + 1)


def step_index(run_path: Path, kind: str, step: int, config: Mapping[str, Any] | None) -> StepIndex:
    """Read what lists of groups need of a completions file, once per version of the file."""
    name = completions_name(kind, step)
    size = group_size(config, kind)
    index = _INDEXES.get(run_path / name, lambda: _read(run_path, name, size), key=size)
    if not index.num_rows and not (run_path / name).exists():
        return replace(index, problems=(why_missing(kind, step, config),))
    return index


def why_missing(kind: str, step: int, config: Mapping[str, Any] | None) -> str:
    """Say why a step has no completions file of a kind."""
    if kind == "eval":
        return f"No completions of an evaluation after step {step}."
    every = integer(config, "run", "completions_every")
    if every is not None and (every == 0 or step % every):
        which = "none are kept" if every == 0 else f"only those of every {every} steps are kept"
        return f"No completions of step {step}: {which} (run.completions_every: {every})."
    if kind != "step":
        return f"No groups of step {step} were {kind}."
    return f"No completions of step {step}: the step is not done, or the file was deleted."


def known_rows(run_path: Path, kind: str, step: int, config: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of a file that was read before."""
    found = _INDEXES.peek(run_path / completions_name(kind, step), key=group_size(config, kind))
    return None if found is None else found.num_rows


def group_size(config: Mapping[str, Any] | None, kind: str) -> int | None:
    """Return the number of completions sampled per prompt, if the configuration is known."""
    section, key = ("eval", "num_samples") if kind == "eval" else ("rollout", "num_generations")
    size = integer(config, section, key)
    return size if size is not None and size > 0 else None


def reward_std(rewards_G: FloatArray) -> float:
    """Unbiased standard deviation of the scored rewards, 0 for fewer than two: as in the metric `reward_std`."""
    scored = rewards_G[~np.isnan(rewards_G)]
    with np.errstate(all="ignore"):  # infinite rewards
        return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0


def has_equal_rewards(rewards_G: FloatArray) -> bool:
    """Whether all scored rewards of a group are equal up to rounding: as in the metric `frac_reward_zero_std`."""
    return reward_std(rewards_G) < _EQUAL


def is_broken(end: str | None) -> bool:
    """Whether infrastructure ended a trajectory."""
    return end in BROKEN


def names_below(names: Sequence[str], prefix: str) -> list[str]:
    """Return what follows a prefix in names of columns, such as `rewards/`."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


_NUMBERS = ("group", "prompt_is_chat", "reward", "advantage", "num_tokens", "policy_version")


def _read(run_path: Path, name: str, size: int | None) -> StepIndex:
    file = ParquetRows(run_path, name)
    n = file.num_rows
    found = file.read_upgraded((*_NUMBERS, "prompt_id", "prompt", "end"), size)
    if n and "group" not in found:
        file.problems.append(f"{name} has no columns 'group' and 'prompt_id': its rows cannot be told apart by prompt.")
    of_rows = {column: numbers(found.get(column), n) for column in _NUMBERS}
    # rows at which another group begins, and the end
    bounds = np.flatnonzero(np.diff(np.nan_to_num(of_rows["group"]), prepend=np.nan, append=np.nan)).tolist()
    ids = found["prompt_id"].to_pylist() if "prompt_id" in found else [None] * n
    prompts, chats = texts(found.get("prompt"), n), (of_rows["prompt_is_chat"] == 1).tolist()
    return StepIndex(
        num_rows=n,
        groups=[range(a, b) for a, b in pairwise(bounds)],
        prompt_ids=[ids[row] for row in bounds[:-1]],
        prompts=[prompt_text(prompts[row], chats[row], PROMPT_CHARS) for row in bounds[:-1]],
        are_chats=[chats[row] for row in bounds[:-1]],
        rewards=of_rows["reward"],
        advantages=of_rows["advantage"],
        lengths=of_rows["num_tokens"],
        policy_versions=of_rows["policy_version"],
        ends=texts(found.get("end"), n),
        previews=_previews(file),
        reward_names=names_below(file.names, "rewards/"),
        environment_names=names_below(file.names, "environment/"),
        problems=tuple(dict.fromkeys(file.problems)),
    )


def _previews(file: ParquetRows) -> list[str]:
    name = "completion"
    if name not in file.names:
        return [""] * file.num_rows
    batches = file.batches([name], range(file.num_rows))
    found = [text for batch in batches for text in texts(batch[name], len(batch[name]), limit=PREVIEW_CHARS)]
    return [text or "" for text in found]


TEXT_CHARS = 200_000  # longest text that is sent to the page
_MESSAGES_CHARS = 1_000_000  # of all texts of a conversation
_MAX_JSON_CHARS = 16_000_000
_MAX_DEPTH = 40
_MAX_ITEMS = 10_000  # of one list
_MAX_KEY_CHARS = 200


class TextBudget:
    """Cuts texts so that all of them together stay bounded."""

    def __init__(self, chars: int = _MESSAGES_CHARS):
        self._left = chars
        self.cut = False

    def take(self, text: str) -> str:
        """Return the text, or as much of it as is left."""
        kept = text[: max(0, min(TEXT_CHARS, self._left))]
        self._left -= len(kept)
        self.cut = self.cut or len(kept) < len(text)
        return without_surrogates(kept)


def without_surrogates(text: str) -> str:
    """Replace half surrogate pairs, which JSON may hold and UTF-8 may not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def parse_json(text: str | None, budget: TextBudget) -> Any:
    """Return a JSON text's value with bounded texts. The text itself if it is not JSON."""
    if text is None:
        return None
    if len(text) > _MAX_JSON_CHARS:
        return budget.take(text)
    try:
        return _bounded(json.loads(text), budget, _MAX_DEPTH)
    except (ValueError, RecursionError):
        return budget.take(text)


def _bounded(value: Any, budget: TextBudget, depth: int) -> Any:
    if isinstance(value, str):
        return budget.take(value)
    if depth == 0 and isinstance(value, list | dict):
        return budget.take(repr(value)[:TEXT_CHARS])
    if isinstance(value, list | dict):
        budget.cut = budget.cut or len(value) > _MAX_ITEMS
    if isinstance(value, list):
        return [_bounded(v, budget, depth - 1) for v in value[:_MAX_ITEMS]]
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {without_surrogates(key)[:_MAX_KEY_CHARS]: _bounded(v, budget, depth - 1) for key, v in items}
    return value


def parse_messages(text: str | None, budget: TextBudget) -> list[dict[str, Any]] | None:
    """Return chat messages that are recorded as JSON; None if there are none."""
    found = parse_json(text, budget)
    return found if isinstance(found, list) and found and all(isinstance(m, dict) for m in found) else None


def parse_prompt(text: str | None, is_chat: bool) -> Any:
    """Return a prompt: a text, or chat messages as a list."""
    messages = parse_messages(text, TextBudget()) if is_chat else None
    return messages or TextBudget().take(text or "")


def prompt_text(text: str | None, is_chat: bool, limit: int) -> str:
    """Return the beginning of a prompt: of the last user message if it is a conversation."""
    prompt = parse_prompt(text, is_chat)
    if isinstance(prompt, str):
        return prompt[:limit]
    of_user = [m.get("content") for m in prompt if m.get("role") == "user"] or [prompt[-1].get("content")]
    return _content_text(of_user[-1])[:limit]


def _content_text(content: Any) -> str:
    """Return a message's text; contents may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def shared_prefix(a: str, b: str) -> int:
    """Return the number of characters at which two texts begin equally."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def calls(value: Any) -> list[dict[str, Any]] | None:
    """Return the model calls of a row, with the number of tokens in place of their ids."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    found = [dict(call) for call in value if isinstance(call, Mapping)]
    without_ids = [{key: v for key, v in call.items() if key != "token_ids"} for call in found]
    counts = [len(call.get("token_ids") or ()) for call in found]
    return [{**call, "tokens": count} for call, count in zip(without_ids, counts, strict=True)]


def named_numbers(row: Mapping[str, Any], prefix: str) -> dict[str, float | None]:
    """Return the numbers of columns whose names begin with a prefix, such as `rewards/`."""
    return {name.removeprefix(prefix): number(v) for name, v in row.items() if name.startswith(prefix)}


def optional_text(value: Any, *, cut: bool = True) -> str | None:
    """Return a value of a row as text, by default of bounded length."""
    text = as_text(value, limit=TEXT_CHARS if cut else None)
    return None if text is None else without_surrogates(text)
