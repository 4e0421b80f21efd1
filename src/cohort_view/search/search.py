"""Search over all completions of a run, newest step first. Matches are yielded as files are read."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from cohort.config.condition import Column, Condition
from cohort_view.completions import PROMPT_CHARS, prompt_text
from cohort_view.run import KINDS, ViewedRun, completions_name, steps_on_disk
from cohort_view.search.condition import Columns, parse
from cohort_view.values import integer, reason, regular_file

_PROGRESS_EVERY_S = 0.3
_SHOWN = ("reward", "text", "group", "prompt", "prompt_is_chat")
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What to search for."""

    text: str = ""  # what the text of a completion contains, in any case; empty for any
    where: str = ""  # a condition as `cohort.config.condition` reads it; empty for none
    step: int | None = None  # only in this step
    kind: str | None = None  # only in completions of this kind
    limit: int = 200  # most matches to yield; all are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A completion that a search found."""

    step: int
    kind: str
    row: int  # in the file
    group: int | None
    prompt: str  # its beginning
    reward: float | None
    column: str  # that `parts` are from
    parts: Sequence[str]  # a text around the first match: every other part is a match, the first is not


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is."""

    files_total: int
    files_done: int = 0
    step: int | None = None  # of the last file
    matches: int = 0  # all of them, also those after the limit
    by_step: Mapping[int, int] = field(default_factory=dict)  # all matches so far
    problems: tuple[str, ...] = ()  # files that cannot be read


@dataclass(frozen=True, kw_only=True)
class Done(Progress):
    """The end of a search."""

    reason: Literal["end", "cancelled"]


def columns(run: ViewedRun) -> list[Column]:
    """Return the columns that a run's completions have."""
    return _columns(run.path, _files(run.path)).listed()


def search(run: ViewedRun, wanted: Search, cancelled: Callable[[], bool]) -> Iterator[Match | Progress | Done]:
    """Search the completions files that a run has now.

    Args:
        run: the run.
        wanted: what to search for.
        cancelled: called between row groups; True ends the search.

    Raises:
        ConditionError: the condition has no meaning, or names a column that the run does not have.
    """
    all_files = _files(run.path)
    known = _columns(run.path, all_files)
    condition = parse(wanted.text, wanted.where, known)
    files = [(s, k) for s, k in all_files if wanted.step in (None, s) and wanted.kind in (None, k)]
    possible = _possible_files(run.path, files, condition, known)
    progress = Progress(files_total=len(files))
    yield progress
    shown = time.monotonic()
    for step, kind in files:
        if cancelled():
            break
        name = completions_name(kind, step)
        try:
            if (fragment := possible.pop(name, None)) is not None:  # a fragment keeps the footer that it has read
                regular_file(run.path, name)
                for num, matches in _matches(fragment, condition, known, wanted.limit - progress.matches, cancelled):
                    by_step = {**progress.by_step, step: progress.by_step.get(step, 0) + num}
                    progress = replace(progress, matches=progress.matches + num, by_step=by_step)
                    for match in matches:
                        yield Match(step=step, kind=kind, **match)
        except FileNotFoundError:  # the run resumed from an earlier step
            pass
        except Exception as error:  # a damaged file can raise anything
            if len(progress.problems) < _MAX_PROBLEMS:
                problem = f"{name} cannot be searched: {reason(error)}."
                progress = replace(progress, problems=(*progress.problems, problem))
        progress = replace(progress, files_done=progress.files_done + 1, step=step)
        if time.monotonic() - shown > _PROGRESS_EVERY_S:
            yield progress
            shown = time.monotonic()
    yield Done(**vars(progress), reason="cancelled" if cancelled() else "end")


def _files(run_path: Path) -> list[tuple[int, str]]:
    """Return step and kind of the completions files, newest step first."""
    by_step = steps_on_disk(run_path)
    return [(step, kind) for step in sorted(by_step, reverse=True) for kind in by_step[step]]


def _columns(run_path: Path, files: Sequence[tuple[int, str]]) -> Columns:
    """Collect the columns of the newest and the oldest file of each kind."""
    names = []
    for kind in KINDS:
        of_kind = [step for step, its_kind in files if its_kind == kind]
        for step in {*of_kind[:1], *of_kind[-1:]}:
            try:
                names.append(pq.read_schema(regular_file(run_path, completions_name(kind, step))).names)
            except Exception:  # the search says which files are damaged
                continue
    return Columns(names)


def _possible_files(
    run_path: Path, files: Sequence[tuple[int, str]], condition: Condition, known: Columns
) -> dict[str, ds.Fragment]:
    """Return the files whose step and kind the condition allows, by name. No file is opened."""
    names = {str(run_path / (name := completions_name(kind, step))): name for step, kind in files}
    of_names = [(ds.field("step") == float(step)) & (ds.field("kind") == kind) for step, kind in files]
    dataset = ds.FileSystemDataset.from_paths(
        list(names), known.schema, ds.ParquetFileFormat(), LocalFileSystem(), partitions=of_names
    )
    return {names[fragment.path]: fragment for fragment in dataset.get_fragments(condition.possible)}


def _matches(
    fragment: ds.Fragment, condition: Condition, known: Columns, most: int, cancelled: Callable[[], bool]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield for each row group of a file the number of rows for which a condition holds, and `most` of them.

    Reads one row group at a time, in the calling thread: files are small, and starting threads takes longer.
    """
    row_groups = fragment.split_by_row_group(condition.possible, known.schema)
    first_rows = [0, *accumulate(group.num_rows for group in fragment.row_groups)]
    patterns = condition.pattern_by_column()
    shown = {name: known.expression(name) for name in (*_SHOWN, *patterns)}
    for row_group in row_groups:
        if cancelled():
            return

        def scan(columns: dict[str, ds.Expression], part: ds.Fragment = row_group) -> ds.Scanner:
            return part.scanner(known.schema, columns=columns, use_threads=False)

        holds = scan({"holds": condition.rows}).to_table()["holds"]
        rows = np.flatnonzero(pc.fill_null(holds, False).to_numpy())
        of_rows = rows[: max(0, most)]
        most -= len(rows)
        first = first_rows[row_group.row_groups[0].id]
        values = scan(shown).take(pa.array(of_rows)).to_pylist() if len(of_rows) else []
        if len(rows):
            yield (
                len(rows),
                [_match(first + row, of, patterns) for row, of in zip(of_rows.tolist(), values, strict=True)],
            )


def _match(row: int, values: Mapping[str, Any], patterns: Mapping[str, str]) -> dict[str, Any]:
    column, parts = _found(values, patterns)
    return {
        "row": row,
        "group": integer(values["group"]),
        "prompt": prompt_text(values["prompt"], values["prompt_is_chat"] is True, PROMPT_CHARS),
        "reward": values["reward"],
        "column": column,
        "parts": parts,
    }


def _found(values: Mapping[str, Any], patterns: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the column that shows why a row is found, and a part of its text."""
    for name, pattern in patterns.items():
        parts = snippet(values[name] or "", pattern)
        if len(parts) > 1:
            return name, parts
    return "text", snippet(values["text"] or "", None)


_OPENING, _CLOSING = "\ufdd0", "\ufdd1"  # around a match; Unicode has no such characters
_BEFORE = 80  # characters shown before the first match
_LINES_BEFORE = 2
_LENGTH = 280  # characters shown


def snippet(text: str, pattern: str | None) -> list[str]:
    """Return a part of a text around the first match of a regular expression, split at its matches.

    Args:
        text: a text.
        pattern: a regular expression, or None for the beginning of the text.

    Returns:
        Text and matches in turn, beginning with text; one text if nothing matches. "…" is where the text is cut.
    """
    if pattern is not None:
        text = pc.replace_substring_regex(pa.scalar(text), f"({pattern})", f"{_OPENING}\\1{_CLOSING}").as_py()
    first = max(0, text.find(_OPENING))
    lines = text[max(0, first - _BEFORE) : first].rsplit("\n", _LINES_BEFORE + 1)
    start = first - len("\n".join(lines[-_LINES_BEFORE - 1 :]))
    end = start + _LENGTH
    cut = f"{'…' if start > 0 else ''}{text[start:end]}{'…' if end < len(text) else ''}"
    return re.split(f"[{_OPENING}{_CLOSING}]", cut)
