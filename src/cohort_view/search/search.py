"""Search over all completions of a run, newest step first. Matches are yielded as files are read."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cohort.errors import describe_error
from cohort_view.completions import KINDS, ParquetRows, completions_name, group_size, steps_on_disk
from cohort_view.run import ViewedRun
from cohort_view.search.evaluate import evaluate, positive_patterns, simplify
from cohort_view.search.grammar import Column, Columns, Node, parse_query, to_text
from cohort_view.search.rows import CompletionsFile, RowGroup, facts_of_name
from cohort_view.search.text import Span, snippet

_PROGRESS_EVERY_S = 0.3
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed search."""

    text: str
    condition: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A completion that a search found."""

    step: int
    kind: str
    row: int  # in the file
    group: int | None
    reward: float | None
    length: int | None  # tokens
    column: str  # that `text` is from
    text: str  # a part of it around the first match
    spans: Sequence[Span]  # matches within `text`, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is."""

    files_done: int
    files_total: int
    step: int | None
    matches: int
    query: str  # as it was understood
    problems: Sequence[str]  # files that cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a search."""

    reason: Literal["end", "limit", "cancelled"]
    files_done: int
    files_total: int
    matches: int
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnList:
    """The columns to search by."""

    columns: Sequence[Column]


def parse(text: str, known: Columns | None = None) -> Query:
    """Parse a search.

    Args:
        text: what the user typed.
        known: the run's columns. None: any name of a reward, detail or environment metric is one.

    Raises:
        QuerySyntaxError: the text is no query.
    """
    return Query(text, parse_query(text, known or Columns()))


def columns(run: ViewedRun) -> ColumnList:
    """Return the columns that a run's completions have."""
    return ColumnList(columns=_known_columns(run.path, _files(run.path)).in_files())


def search(
    run: ViewedRun, query: str | Query, limit: int, cancelled: Callable[[], bool]
) -> Iterator[Match | Progress | Done]:
    """Search the completions files that a run has now.

    Args:
        run: the run.
        query: the search.
        limit: most matches; 0 only checks the query.
        cancelled: called between row groups; True ends the search.

    Raises:
        QuerySyntaxError: the text is no query, or names a column that the run does not have.
    """
    files = _files(run.path)
    known = _known_columns(run.path, files)
    parsed = parse(query if isinstance(query, str) else query.text, known)
    return _Search(run, parsed.condition, known, files, limit, cancelled).events()


class _CancelledError(Exception):
    pass


class _Search:
    """A search under way."""

    def __init__(
        self,
        run: ViewedRun,
        condition: Node,
        known: Columns,
        files: Sequence[tuple[int, str]],
        limit: int,
        cancelled: Callable[[], bool],
    ):
        self._run = run
        self._condition = condition
        self._types = {column.name: column.type for column in known}
        self._patterns = positive_patterns(condition)
        self._files = files
        self._limit = limit
        self._cancelled = cancelled
        self._problems: list[str] = []
        self._matches = 0
        self._files_done = 0

    def events(self) -> Iterator[Match | Progress | Done]:
        yield self._progress(None)
        shown = time.monotonic()
        try:
            for step, kind in self._files:
                if self._matches >= self._limit:
                    break
                yield from self._matches_of_file(step, kind)
                self._files_done += 1
                if time.monotonic() - shown > _PROGRESS_EVERY_S:
                    yield self._progress(step)
                    shown = time.monotonic()
        except _CancelledError:
            yield self._done("cancelled")
            return
        yield self._done("limit" if self._matches >= self._limit else "end")

    def _matches_of_file(self, step: int, kind: str) -> Iterator[Match]:
        condition = simplify(self._condition, facts_of_name(step, kind))
        if condition is False:
            self._check()
            return
        name = completions_name(kind, step)
        try:
            with CompletionsFile(self._run.path, name) as file:
                for row_group in file.row_groups(self._types.__getitem__, self._check):
                    rows = _rows(row_group, condition)[: self._limit - self._matches]
                    if not rows:
                        continue
                    group_of = file.group_of(group_size(self._run.config, kind))
                    for row, match in zip(rows, self._shown(row_group, rows), strict=True):
                        at = row_group.first_row + row
                        self._matches += 1
                        yield Match(step=step, kind=kind, row=at, group=group_of(at), **match)
                    if self._matches >= self._limit:
                        return
        except FileNotFoundError:  # the run resumed from an earlier step
            return
        except _CancelledError:
            raise
        except Exception as error:  # a damaged file can raise anything
            self._add_problem(name, error)

    def _shown(self, row_group: RowGroup, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield what a match shows of each of these rows of a row group."""
        searched = sorted(self._patterns, key=lambda column: column != "text")
        names = list(dict.fromkeys([*searched, "text"]))
        for reward, length, *texts in zip(
            row_group.values_at("reward", rows),
            row_group.values_at("length", rows),
            *(row_group.values_at(name, rows) for name in names),
            strict=True,
        ):
            num_tokens = length.as_py()
            shown = {"reward": reward.as_py(), "length": None if num_tokens is None else int(num_tokens)}
            for name, text in zip(names, texts, strict=True):
                pattern = self._patterns.get(name)
                found = snippet(text, pattern) if pattern is not None else None
                if found is not None:
                    yield shown | {"column": name, "text": found[0], "spans": found[1]}
                    break
            else:
                text, spans = snippet(texts[names.index("text")], None) or ("", ())
                yield shown | {"column": "text", "text": text, "spans": spans}

    def _check(self) -> None:
        if self._cancelled():
            raise _CancelledError

    def _add_problem(self, name: str, error: Exception) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            why = ParquetRows(self._run.path, name).problems
            self._problems.append(why[0] if why else f"{name} cannot be searched: {describe_error(error, 200)}.")
        elif len(self._problems) == _MAX_PROBLEMS:
            self._problems.append("More files cannot be read.")

    def _progress(self, step: int | None) -> Progress:
        return Progress(
            files_done=self._files_done,
            files_total=len(self._files),
            step=step,
            matches=self._matches,
            query=to_text(self._condition),
            problems=tuple(self._problems),
        )

    def _done(self, reason: Literal["end", "limit", "cancelled"]) -> Done:
        return Done(
            reason=reason,
            files_done=self._files_done,
            files_total=len(self._files),
            matches=self._matches,
            problems=tuple(self._problems),
        )


def _rows(row_group: RowGroup, condition: Node | bool) -> list[int]:
    """Return the rows of a row group that a condition holds for."""
    if not isinstance(condition, bool):
        condition = simplify(condition, row_group.facts)
    if isinstance(condition, bool):
        return list(range(row_group.num_rows)) if condition else []
    found: list[int] = np.flatnonzero(evaluate(condition, row_group.leaf_rows)).tolist()
    return found


def _files(run_path: Path) -> list[tuple[int, str]]:
    """Return step and kind of the completions files, newest step first."""
    by_step = steps_on_disk(run_path)
    return [(step, kind) for step in sorted(by_step, reverse=True) for kind in by_step[step]]


def _known_columns(run_path: Path, files: Sequence[tuple[int, str]]) -> Columns:
    """Collect the columns of the newest and the oldest file of each kind."""
    names: set[str] = set()
    for kind in KINDS:
        of_kind = [step for step, its_kind in files if its_kind == kind]
        for step in {*of_kind[:1], *of_kind[-1:]}:
            try:
                with CompletionsFile(run_path, completions_name(kind, step)) as file:
                    names.update(file.names)
            except Exception:  # the search says which files are damaged
                continue
    return Columns(names or None)
