"""`cohort view RUN --export FILE`: the page of one run as a file, with as much of its data as fits.

Data has the paths of the server's answers as keys, so that the page's code is the same.
"""

import base64
import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from starlette.datastructures import QueryParams

from cohort.atomic_files import write_file_atomically
from cohort.errors import UserError
from cohort.view.bundle import bundle_page
from cohort.view.completions import steps_on_disk
from cohort.view.groups import MAX_GROUPS
from cohort.view.records import to_json
from cohort.view.run import ViewedRun
from cohort.view.server.app import ANSWERS, Asked
from cohort.view.server.events import Watcher
from cohort.view.server.query import Query
from cohort.view.server.runs import Runs
from cohort.view.server.static_files import STATIC

MAX_BYTES = 5_000_000
_CURVES_SHARE = 0.35  # of the file
_POINTS = (800, 400, 200, 100, 50)  # per curve; the most that fits its share
_TOKENS_SHARE = 0.3  # of what the curves leave
_NUM_STEPS = 60
_NUM_TOKEN_VIEWS = 3_000  # at most: bounds the time
_VIEWS_PER_STEP = 10  # take about as long as a step's groups
_DIGITS = 6  # significant digits of numbers
_WHOLE = ("/api/runs", *(f"/api/runs/{{id}}/{name}" for name in ("now", "metrics", "config", "machine", "heldout")))
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^/@\s\"\\]{1,200}@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and what was left out."""

    num_bytes: int
    note: str


class _Data:
    """Answers by path: one JSON object, compressed as it grows, within a number of characters of base64."""

    def __init__(self, watcher: Watcher, run: ViewedRun, max_chars: int):
        self.run = run
        self._watcher = watcher
        self._max_chars = max_chars
        self._packer = zlib.compressobj(9)
        self._packed = self._packer.compress(b"{") + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._separator = ""

    @property
    def left_chars(self) -> int:
        """Characters left."""
        return self._max_chars - _num_chars(len(self._packed))

    def ask(self, route: str, query: str = "", **path: object) -> tuple[str, Any]:
        """Return the path of an answer, and the answer as plain JSON values."""
        parts = {"id": self.run.id, **{name: str(value) for name, value in path.items()}}
        asked = Asked(self._watcher, parts, Query(QueryParams(query)))
        value = json.loads(to_json(ANSWERS[route](asked)))
        return route.format(**parts) + (f"?{query}" if query else ""), value

    def add(self, answers: Mapping[str, Any], *, keep_chars: float = 0) -> bool:
        """Add answers, all or none: if `keep_chars` remain left. Returns whether they were added."""
        pairs = (f"{json.dumps(path)}:{_without_passwords(to_json(value))}" for path, value in answers.items())
        packer = self._packer.copy()
        text = (self._separator + ",".join(pairs)).encode()
        more = packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)
        if self._max_chars - _num_chars(len(self._packed) + len(more)) < keep_chars:
            return False
        self._packer, self._packed, self._separator = packer, self._packed + more, ","
        return True

    def base64(self) -> str:
        """Return everything."""
        packer = self._packer.copy()
        return base64.b64encode(self._packed + packer.compress(b"}") + packer.flush()).decode()


def export_run(
    run_dir: Path,
    file: Path,
    *,
    max_bytes: int = MAX_BYTES,
    static: Path = STATIC,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Report:
    """Write the page of a run to an HTML file.

    Args:
        run_dir: the run folder.
        file: file to write; one that is there is replaced.
        max_bytes: most bytes of the file.
        static: folder of the page's files.
        on_progress: called with the number of parts done, and of all.

    Raises:
        UserError: the file cannot be written, or nothing fits.
    """
    watcher = Watcher(Runs([run_dir]))
    watcher.stop()  # nobody listens
    [run] = watcher.runs.all()
    empty = len(bundle_page(static, data="", footer="x" * 2000).encode())
    data = _Data(watcher, run, max_bytes - empty - 100)
    answers = dict(data.ask(route) for route in _WHOLE)
    if not data.add(answers):
        raise UserError(f"--export: the run's metrics and configuration alone exceed {max_bytes / 1e6:.1f} MB")
    points = _add_curves(data, [metric["name"] for metric in answers[f"/api/runs/{run.id}/metrics"]["metrics"]])
    steps = _choose_steps(run)
    total = len(steps.wanted) + _NUM_TOKEN_VIEWS // _VIEWS_PER_STEP
    added = _add_steps(data, steps.wanted, lambda done: on_progress(done, total))
    num_rows, num_tokens = _add_tokens(data, added, lambda done: on_progress(len(steps.wanted) + done, total))
    note = _note(run, steps, list(added), points=points, num_tokens=num_tokens, num_rows=num_rows)
    page = bundle_page(static, data=data.base64(), footer=note)
    try:
        with write_file_atomically(file) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export: {str(file)!r} cannot be written: {error.strerror}") from error
    return Report(len(page.encode()), note)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of which completions are kept, and those to add, the most wanted first."""

    available: Sequence[int]
    wanted: Sequence[int]


def _add_curves(data: _Data, names: Sequence[str]) -> int:
    """Add all curves by step and by time with as many points as fit; returns the number of points per curve."""
    keep = data.left_chars * (1 - _CURVES_SHARE)
    listed = {"runs": quote(data.run.id), "names": ",".join(map(quote, names))}
    for points in _POINTS:
        answers = {}
        for x in ("step", "time"):
            query = QueryParams({**listed, "x": x, "points": points})
            answers[f"/api/curves?x={x}"] = _round(data.ask("/api/curves", str(query))[1])
        if data.add(answers, keep_chars=keep):
            return points
    data.add({f"/api/curves?x={x}": {"curves": [], "marks": {}} for x in ("step", "time")})
    return 0


def _choose_steps(run: ViewedRun) -> _Steps:
    """Choose the last and first step, those in which least was learned, and others evenly spread."""
    available = [step for step, kinds in steps_on_disk(run.path).items() if "step" in kinds]
    if not available:
        return _Steps([], [])
    metrics = run.metrics
    equal = dict(zip(metrics.steps.tolist(), metrics.column("frac_reward_zero_std").tolist(), strict=True))
    least = sorted(available, key=lambda step: -np.nan_to_num(equal.get(step, 0.0)))[: _NUM_STEPS // 5]
    places = np.unique(np.linspace(0, len(available) - 1, _NUM_STEPS).round().astype(int)).tolist()
    # first halves, then quarters, then eighths: whatever fits is evenly spread
    places.sort(key=lambda place: _bit_reversed(place, len(available)))
    wanted = dict.fromkeys([available[-1], available[0], *least[:2], *(available[place] for place in places), *least])
    return _Steps(available, list(wanted)[:_NUM_STEPS])


def _bit_reversed(index: int, length: int) -> int:
    bits = max(1, (length - 1).bit_length())
    return int(f"{index:0{bits}b}"[::-1], 2)


def _add_steps(data: _Data, wanted: Sequence[int], on_done: Callable[[int], object]) -> dict[int, list[int]]:
    """Add steps with all their groups while they fit. Returns the rows of completions of those that did."""
    keep = data.left_chars * _TOKENS_SHARE
    rows: dict[int, list[int]] = {}
    listed: dict[int, Any] = {}
    for num_done, step in enumerate(wanted, 1):
        path, of_step = data.ask("/api/runs/{id}/steps/{step}", f"sort=order&limit={MAX_GROUPS}", step=step)
        answers = {path.partition("?")[0]: of_step}
        for group in of_step["groups"]:
            answers.update([data.ask("/api/runs/{id}/steps/{step}/groups/{index}", step=step, index=group["index"])])
        if data.add(answers, keep_chars=keep):
            # the first of each group, then the second of each
            members = itertools.zip_longest(*(group["rows"] for group in of_step["groups"]))
            rows[step] = [row["row"] for turn in members for row in turn if row is not None]
            listed[step] = {"step": step, "kinds": ["step"], "rows": len(rows[step])}
        on_done(num_done)
    steps = sorted(rows)
    ends = {"first": steps[0], "last": steps[-1]} if steps else {"first": None, "last": None}
    data.add({f"/api/runs/{data.run.id}/steps": {"steps": [listed[step] for step in steps], **ends}})
    return {step: rows[step] for step in steps}


def _add_tokens(
    data: _Data, rows_of_steps: Mapping[int, Sequence[int]], on_done: Callable[[int], object]
) -> tuple[int, int]:
    """Add completions token by token, of each step in turn. Returns the number of completions, and of those added."""
    turns = itertools.zip_longest(*([(step, row) for row in rows] for step, rows in rows_of_steps.items()))
    wanted = [entry for turn in turns for entry in turn if entry is not None]
    for num_added, (step, row) in enumerate(wanted):
        if num_added == _NUM_TOKEN_VIEWS:
            return len(wanted), num_added
        path, value = data.ask("/api/runs/{id}/steps/{step}/completions/{row}", step=step, row=row)
        if not data.add({path: _round(value)}):
            return len(wanted), num_added
        on_done(num_added // _VIEWS_PER_STEP)
    return len(wanted), len(wanted)


def _note(run: ViewedRun, steps: _Steps, added: Sequence[int], *, points: int, num_tokens: int, num_rows: int) -> str:
    """Return the text below the page: what was exported when, and what was left out."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    sentences = [f"Exported from run {run.name} on {when}."]
    if len(added) < len(steps.available):
        which = f": {', '.join(map(str, added))}" if added else ""
        sentences.append(f"Completions: {len(added):,} of {len(steps.available):,} steps{which}.")
    if num_tokens < num_rows:
        sentences.append(f"Token by token: {num_tokens:,} of {num_rows:,} completions.")
    longest = max(len(run.metrics.steps), len(run.metrics.eval.steps))
    if points < longest:
        sentences.append(f"Curves: at most {points} of {longest:,} points, with the highest and lowest.")
    sentences.append("Search and live updates need `cohort view`.")
    return " ".join(sentences)


def _num_chars(num_bytes: int) -> int:
    """Return the length of bytes in base64."""
    return (num_bytes + 2) // 3 * 4


def _without_passwords(text: str) -> str:
    """Hide the passwords of URLs, which completions, messages and paths may hold."""
    return _URL_PASSWORD.sub(r"\1***@", text)


def _round(value: Any) -> Any:
    """Round numbers to what a chart shows."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, list):
        return [_round(v) for v in value]
    if isinstance(value, dict):
        return {key: _round(v) for key, v in value.items()}
    return value
