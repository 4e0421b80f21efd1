"""Read Parquet files of a run (completions/ and tokens/) by column and range of rows, and find its groups.

A file may be missing, or damaged by a full disk or a power failure. Then `problems` has one sentence that says so.
Files are not memory-mapped: one that shrinks while it is read must not kill the process.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cohort.records import BROKEN, FloatArray, IntArray
from cohort_view.run import completions_name
from cohort_view.values import integer, number, reason, regular_file

Signature = tuple[int, int, int]  # inode, mtime in nanoseconds, size in bytes
T = TypeVar("T")

_TEXTS = ("prompt", "answer", "completion", "end", "error", "messages")  # columns


def signature(path: Path) -> Signature | None:
    """Return what changes if a file is replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class FileCache(Generic[T]):
    """What was computed from files, for as long as they do not change. Keeps those used last; thread-safe."""

    def __init__(self, size: int):
        """Create a cache of `size` values."""
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[Any, tuple[Signature | None, T]] = OrderedDict()

    def get(self, path: Path, compute: Callable[[], T], *, key: Any = None) -> T:
        """Return the value for a file, and for `key` if one file has several."""
        now = signature(path)
        if (known := self.peek(path, key=key)) is not None:
            return known
        value = compute()
        with self._lock:
            self._values[path, key] = now, value
            self._values.move_to_end((path, key))
            if len(self._values) > self._size:
                self._values.popitem(last=False)
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
        is_missing: whether there is no such file.
        row_groups: rows of each row group.
        problems: sentences on what could not be read.
    """

    def __init__(self, run_path: Path, name: str):
        self.name = name
        self.names: tuple[str, ...] = ()
        self.row_groups: list[range] = []
        self.num_rows = 0
        self.is_missing = False
        self.problems: list[str] = []
        with self.noting_problems():
            self._file = pq.ParquetFile(regular_file(run_path, name))
            schema = self._file.schema_arrow
            self.names = tuple(schema.names)
            for column in schema:
                if (column.name in _TEXTS or column.name.startswith("details/")) and not _holds_text(column.type):
                    raise ValueError(f"its column {column.name!r} holds no text")
            metadata = self._file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            bounds = np.cumsum([0, *sizes]).tolist()
            self.row_groups = [range(a, b) for a, b in pairwise(bounds)]
            self.num_rows = bounds[-1]

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turn an error of what reads the file into a sentence, after which the file counts as empty."""
        try:
            yield
            return
        except FileNotFoundError:
            self.is_missing, problem = True, f"{self.name} does not exist."
        except Exception as error:  # a damaged file can raise anything
            problem = f"{self.name} cannot be read: {reason(error)}."
        self.problems.append(problem)
        self.num_rows, self.row_groups = 0, []

    def read(self, columns: Sequence[str], rows: range | None = None) -> dict[str, pa.ChunkedArray]:
        """Read columns of a range of rows; those that the file does not have are missing from the result."""
        rows = range(self.num_rows) if rows is None else range(max(0, rows.start), min(self.num_rows, rows.stop))
        wanted = [i for i, group in enumerate(self.row_groups) if group.start < rows.stop and rows.start < group.stop]
        if not wanted:
            return {}
        with self.noting_problems():
            names = [name for name in columns if name in self.names]
            table = self._file.read_row_groups(wanted, names, use_threads=False)
            table = table.slice(rows.start - self.row_groups[wanted[0]].start, len(rows))
            table.validate(full=True)
            return dict(zip(table.column_names, table.columns, strict=True))
        return {}


def _holds_text(of: pa.DataType) -> bool:
    return bool(pa.types.is_string(of) or pa.types.is_large_string(of) or pa.types.is_null(of))


def numbers(column: pa.ChunkedArray | None, length: int) -> FloatArray:
    """Return a column's numbers, NaN where null or missing."""
    if column is None:
        return np.full(length, np.nan)
    return np.array(column.to_pylist(), dtype=np.float64)  # the column's own `to_numpy` imports pandas


def texts(column: pa.ChunkedArray | None, length: int) -> list[Any]:
    """Return a column's values, None where null or missing."""
    return [None] * length if column is None else list(column.to_pylist())


def group_bounds(groups_N: FloatArray) -> IntArray:
    """Return the rows at which another group begins, and the number of rows, from each row's group. [P + 1]"""
    return np.flatnonzero(np.diff(groups_N, prepend=np.nan, append=np.nan))


PROMPT_CHARS = 400
_EQUAL = 1e-8  # as in cohort.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """A completions file. N rows, P groups; NaN and None where the file has no value."""

    num_rows: int = 0
    groups: Sequence[range] = ()  # [P] rows of each group
    prompt_ids: Sequence[int] = ()  # [P]
    prompts: Sequence[str] = ()  # [P] beginnings
    rewards: FloatArray = field(default_factory=lambda: np.zeros(0))  # [N]
    lengths: FloatArray = field(default_factory=lambda: np.zeros(0))  # [N] tokens sampled
    policy_versions: FloatArray = field(default_factory=lambda: np.zeros(0))  # [N]
    ends: Sequence[str | None] = ()  # [N]
    problems: Sequence[str] = ()
    is_missing: bool = False  # whether there is no such file

    def intact_lengths(self, rows: range) -> FloatArray:
        """Return the lengths of the completions that infrastructure did not break, as in metrics of lengths."""
        return np.array([self.lengths[row] for row in rows if not is_broken(self.ends[row])], dtype=np.float64)


_INDEXES: FileCache[StepIndex] = FileCache(200)  # a file of 1,000 rows takes about 300 kB


def step_index(run_path: Path, kind: str, step: int, config: Mapping[str, Any] | None) -> StepIndex:
    """Read what lists of groups need of a completions file, once per version of the file."""
    name = completions_name(kind, step)
    index = _INDEXES.get(run_path / name, lambda: _read(run_path, name))
    if index.is_missing:
        return replace(index, problems=(why_missing(kind, step, config),))
    return index


def why_missing(kind: str, step: int, config: Mapping[str, Any] | None) -> str:
    """Say why a step has no completions file of a kind."""
    if kind == "eval":
        return f"No evaluation completions after step {step}."
    every = integer(config, "run", "completions_every")
    if every is not None and (every == 0 or step % every):
        which = "none are kept" if every == 0 else f"only those of every {every} steps are kept"
        return f"No completions of step {step}: {which} (run.completions_every: {every})."
    if kind != "step":
        return f"No groups of step {step} were {kind}."
    return f"No completions of step {step}: the step is not done, its file is still being written, or it was deleted."


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


_NUMBERS = ("group", "reward", "num_tokens", "policy_version")
_NEEDED = ("group", "prompt_id", "prompt", "prompt_is_chat", "num_tokens", "end", "completion", "reward")


def _read(run_path: Path, name: str) -> StepIndex:
    file = ParquetRows(run_path, name)
    with file.noting_problems():
        if missing := [column for column in _NEEDED if file.num_rows and column not in file.names]:
            raise ValueError(f"it has no column {missing[0]!r}")
        found = file.read((*_NUMBERS, "prompt_id", "prompt", "prompt_is_chat", "end"))
        n = file.num_rows
        of_rows = {column: numbers(found.get(column), n) for column in _NUMBERS}
        bounds = group_bounds(of_rows["group"]).tolist()
        prompts, chats, ids = (
            [values[row] for row in bounds[:-1]]
            for values in (texts(found.get(name), n) for name in ("prompt", "prompt_is_chat", "prompt_id"))
        )
        return StepIndex(
            num_rows=n,
            groups=[range(a, b) for a, b in pairwise(bounds)],
            prompt_ids=ids,
            prompts=[prompt_text(*of_group, PROMPT_CHARS) for of_group in zip(prompts, chats, strict=True)],
            rewards=of_rows["reward"],
            lengths=of_rows["num_tokens"],
            policy_versions=of_rows["policy_version"],
            ends=texts(found.get("end"), n),
            problems=tuple(dict.fromkeys(file.problems)),
            is_missing=file.is_missing,
        )
    return StepIndex(problems=tuple(dict.fromkeys(file.problems)))


TEXT_CHARS = 200_000  # longest text that is sent to the page
_MESSAGES_CHARS = 1_000_000  # of all texts of a conversation
_MAX_JSON_CHARS = 16_000_000
_MAX_DEPTH = 40


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
    if isinstance(value, list):
        return [_bounded(v, budget, depth - 1) for v in value]
    if isinstance(value, dict):
        return {without_surrogates(key): _bounded(v, budget, depth - 1) for key, v in value.items()}
    return value


def parse_messages(text: str | None, budget: TextBudget) -> list[dict[str, Any]] | None:
    """Return chat messages that are recorded as JSON; None if there are none."""
    found = parse_json(text, budget)
    return found if isinstance(found, list) and found and all(isinstance(m, dict) for m in found) else None


def parse_prompt(text: str | None, is_chat: bool, budget: TextBudget) -> Any:
    """Return a prompt: a text, or chat messages as a list."""
    return (parse_messages(text, budget) if is_chat else None) or budget.take(text or "")


def prompt_and_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's prompt and its expected answer, None if there is none, and whether they are cut."""
    of_prompt, of_answer = TextBudget(), TextBudget()
    prompt = parse_prompt(row.get("prompt"), row.get("prompt_is_chat") is True, of_prompt)
    answer = None if row.get("answer") is None else of_answer.take(row["answer"])
    return {"prompt": prompt, "prompt_cut": of_prompt.cut, "answer": answer, "answer_cut": of_answer.cut}


def prompt_text(text: str | None, is_chat: bool, limit: int) -> str:
    """Return the beginning of a prompt: of the last user message if it is a conversation."""
    prompt = parse_prompt(text, is_chat, TextBudget())
    if isinstance(prompt, str):
        return prompt[:limit]
    of_user = [m.get("content") for m in prompt if m.get("role") == "user"] or [prompt[-1].get("content")]
    return _content_text(of_user[-1])[:limit]


def _content_text(content: Any) -> str:
    """Return a message's text; contents may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def named_numbers(row: Mapping[str, Any], prefix: str) -> dict[str, float | None]:
    """Return the numbers of columns whose names begin with a prefix, such as `rewards/`."""
    return {name.removeprefix(prefix): number(v) for name, v in row.items() if name.startswith(prefix)}
