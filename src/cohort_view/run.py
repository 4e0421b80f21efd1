"""A run folder as the page sees it: files are read once, then only what is new."""

import json
import math
import os
import re
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from cohort.config.load import read_yaml
from cohort.health.findings import HEALTH, Finding, findings_in
from cohort.health.metrics_table import MetricsBuilder, MetricsTable
from cohort.run.files import format_line_numbers
from cohort.run.provenance import hide
from cohort_view.json_lines import JsonLines, parse_lines
from cohort_view.values import inside, integer, number, reason, regular_file, text

STEPS_SHOWN = 200
KINDS = ("step", "replaced", "dropped", "eval")
_COMPLETIONS_FILE = re.compile(rf"({'|'.join(KINDS)})-([0-9]{{1,15}})\.parquet")

_MAX_FILE_BYTES = 4 << 20  # of config.yaml, plan.json and the like
_READ_AT_ONCE_BYTES = 1 << 20  # of metrics.jsonl; the metrics of longer runs are read when they are asked for
_TAIL_BYTES = 128 << 10  # of metrics.jsonl, read for the list of runs
_LOOKED_AT = ("config.yaml", "plan.json", "summary.json", "status.json", "completions")
_SMALL_FILES: Sequence[tuple[str, str, Callable[[str], object]]] = (  # the attribute, the file and what reads it
    ("config", "config.yaml", read_yaml),
    ("plan", "plan.json", json.loads),
    ("summary", "summary.json", json.loads),
    ("status", "status.json", json.loads),
)
_EVENTS_WITH_TEXT = ("start", "warning", "stop")  # in which secrets are hidden
_FRESH_S = 60.0  # a run of another machine counts as running if it wrote its status this recently


RunState = Literal["starting", "running", "finished", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of events.jsonl."""

    timestamp: float  # Unix seconds; NaN if the line has none
    step: int | None
    event: str
    values: Mapping[str, Any]  # all other keys, secrets hidden


def steps_on_disk(run_path: Path) -> dict[int, tuple[str, ...]]:
    """Return the kinds of completions files by step, in ascending order of steps, from file names alone."""
    found: dict[int, list[str]] = {}
    try:
        names = os.listdir(inside(run_path, "completions"))
    except OSError:
        return {}
    for name in names:
        if match := _COMPLETIONS_FILE.fullmatch(name):
            found.setdefault(int(match[2]), []).append(match[1])
    return {step: tuple(sorted(found[step], key=KINDS.index)) for step in sorted(found)}


def steps_around(run_path: Path, around: int | None = None) -> dict[str, Any]:
    """List the steps of which completions are kept: those nearest to `around`, by default the last."""
    by_step = steps_on_disk(run_path)
    steps = list(by_step)
    place = len(steps) - 1 if around is None else bisect_left(steps, around)
    start = max(0, min(place - STEPS_SHOWN // 2, len(steps) - STEPS_SHOWN))
    shown = [{"step": step, "kinds": by_step[step]} for step in steps[start : start + STEPS_SHOWN]]
    return {"steps": shown, "first": steps[0] if steps else None, "last": steps[-1] if steps else None}


def completions_name(kind: str, step: int) -> str:
    """Return a completions file's name within the run folder."""
    return f"completions/{kind}-{step:06d}.parquet"


class ViewedRun:
    """A run folder, of any version and in any state. Nothing here raises because of what the folder holds.

    Attributes are snapshots: take `metrics` once per request, since `refresh` replaces it in another thread.

    Attributes:
        path: the folder.
        id: URL-safe name, unique on the page.
        name: name of the folder.
        config: content of config.yaml; None if it cannot be read.
        plan: content of plan.json; None if it cannot be read.
        summary: content of summary.json, which a finished run has.
        status: content of status.json; None if it cannot be read.
        events: lines of events.jsonl, but for the events `health`.
        findings: those of the last event `health`.
        gone: that the folder is gone or was emptied, as a sentence; None if it is there.
    """

    def __init__(self, path: Path, id: str):
        self.path = path
        self.id = id
        self.name = path.name or str(path)
        self.config: Mapping[str, Any] | None = None
        self.plan: Mapping[str, Any] | None = None
        self.summary: Mapping[str, Any] | None = None
        self.status: Mapping[str, Any] | None = None
        self.events: list[Event] = []
        self.findings: list[Finding] = []
        self.gone: str | None = None
        self.has_all_metrics = False  # else only the last ones were needed so far
        self._metrics = MetricsBuilder().table()
        self._lock = threading.RLock()
        self._problems: dict[str, str] = {}
        self._seen: dict[str, tuple[int, ...] | None] = {}
        self._metrics_file = JsonLines(path / "metrics.jsonl")
        self._events_file = JsonLines(path / "events.jsonl")
        self._builder = MetricsBuilder()
        self._bad_lines: list[int] = []
        self._num_lines = 0
        self._had_metrics = False
        self._had_files = False
        self._last_state: RunState = "stopped"

    @property
    def metrics(self) -> MetricsTable:
        """Training metrics by step; `metrics.eval` has those of evaluations. Reads them when first asked for."""
        if not self.has_all_metrics:
            with self._lock:
                if not self.has_all_metrics:
                    self._read_new_metrics()
        return self._metrics

    @property
    def last_metrics(self) -> MetricsTable:
        """The last rows of the metrics, or all if they were read."""
        return self._metrics

    @property
    def problems(self) -> list[str]:
        """What cannot be read, one sentence each."""
        return list(self._problems.values()) if self.gone is None else [self.gone]

    @property
    def state(self) -> RunState:
        """Whether the run is starting, running, finished or stopped, now."""
        phase = text(self.status, "phase") or "stopped"
        if phase not in ("finished", "stopped") and _is_alive(self.status):
            return "starting" if phase == "starting" else "running"
        return "finished" if self.summary is not None or phase == "finished" else "stopped"

    @property
    def updated(self) -> float | None:
        """Unix seconds of the last change to the run's small files."""
        times = [number(self.status, "timestamp") or 0.0]
        for name in ("metrics.jsonl", "events.jsonl", "summary.json", "config.yaml"):
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(times) or None

    def refresh(self) -> set[str]:
        """Read what is new.

        Returns:
            What changed, of "config", "plan", "summary", "status", "metrics", "events" and "completions".
        """
        with self._lock:
            changed = {part for part, name, parse in _SMALL_FILES if self._read_mapping(part, name, parse)}
            changed |= {"metrics"} if self._read_metrics() else set()
            changed |= {"events"} if self._read_events() else set()
            changed |= {"completions"} if self._has_changed("completions") else set()
            self._note_missing()
            if (gone := self._what_is_gone()) != self.gone:
                self.gone = gone
                changed.add("status")
            if (state := self.state) != self._last_state:  # also when the process just died
                self._last_state = state
                changed.add("status")
        return changed

    def _read_mapping(self, part: str, name: str, parse: Callable[[str], object]) -> bool:
        """Read a small file into the attribute `part` if it changed."""
        if not self._has_changed(name):
            return False
        self._problems.pop(name, None)
        value = None
        try:
            file = regular_file(self.path, name)
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError("too large")
            value = parse(file.read_text(encoding="utf-8"))
            if not isinstance(value, Mapping):
                raise ValueError("not a mapping of keys")
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, RecursionError) as error:
            value = None
            self._problems[name] = f"{name} cannot be read: {reason(error)}"
        setattr(self, part, value)
        return True

    def _read_metrics(self) -> bool:
        """Read what was appended to the metrics; of a long run whose metrics nobody asked for, the last rows."""
        if self.has_all_metrics:
            return self._read_new_metrics()
        if not self._has_changed("metrics.jsonl"):
            return False
        try:
            with regular_file(self.path, "metrics.jsonl").open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > _READ_AT_ONCE_BYTES:
                    file.seek(size - _TAIL_BYTES)
                    whole_lines = file.read(_TAIL_BYTES).partition(b"\n")[2].rpartition(b"\n")[0]
                    builder = MetricsBuilder()
                    builder.append(list(parse_lines(whole_lines + b"\n")))
                    self._metrics = builder.table()
                    return True
        except OSError:  # said when all metrics are read
            pass
        self._read_new_metrics()
        return True

    def _read_new_metrics(self) -> bool:
        try:
            change = self._metrics_file.check()
            if change == "unchanged":
                self.has_all_metrics = True
                return False
            self._problems.pop("metrics.jsonl", None)
            if change == "rewritten":
                self._builder, self._bad_lines, self._num_lines = MetricsBuilder(), [], 0
            inside(self.path, "metrics.jsonl")
            for block in self._metrics_file.blocks() if self._metrics_file.exists else ():
                are_rows = self._builder.append(list(parse_lines(block)))
                self._bad_lines += [self._num_lines + n for n, is_row in enumerate(are_rows, 1) if not is_row]
                self._num_lines += len(are_rows)
        except OSError as error:
            self._problems["metrics.jsonl"] = f"metrics.jsonl cannot be read: {reason(error)}"
        else:
            if self._bad_lines:
                lines = format_line_numbers(self._bad_lines)
                self._problems["metrics.jsonl"] = f"metrics.jsonl: {lines} cannot be read and left out"
        self._metrics = self._builder.table()
        self.has_all_metrics = True
        return True

    def _read_events(self) -> bool:
        try:
            change = self._events_file.check()
            if change == "unchanged":
                return False
            self._problems.pop("events.jsonl", None)
            if change == "rewritten":
                self.events, self.findings = [], []
            events, health = list(self.events), None
            inside(self.path, "events.jsonl")
            for block in self._events_file.blocks() if self._events_file.exists else ():
                for row in parse_lines(block):
                    if row is not None and row.get("event") == HEALTH:
                        health = row
                    elif row is not None:
                        events.append(_event(row))
            self.events = events
            if health is not None:
                self.findings = findings_in(health)
        except OSError as error:
            self._problems["events.jsonl"] = f"events.jsonl cannot be read: {reason(error)}"
        return True

    def _has_changed(self, name: str) -> bool:
        found: tuple[int, ...] | None = None
        with suppress(OSError):
            stat = os.stat(self.path / name)
            found = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        changed = name not in self._seen or self._seen[name] != found
        first = name not in self._seen
        self._seen[name] = found
        return changed and not (first and found is None)

    def _note_missing(self) -> None:
        """Note missing files that any run has by the time it has the others."""
        has_metrics = self._has_metrics()
        self._had_metrics |= has_metrics
        has_more = self._had_metrics or self.summary is not None or self._seen.get("completions") is not None
        for name, is_missing in (
            ("config.yaml", self._seen.get("config.yaml") is None),
            ("plan.json", self._seen.get("plan.json") is None and has_metrics),
            ("metrics.jsonl", not has_metrics and has_more and "metrics.jsonl" not in self._problems),
        ):
            if is_missing:
                self._problems[name] = f"{name} is missing"

    def _what_is_gone(self) -> str | None:
        """Say that the folder, or all that a run writes there, is gone. A run that just starts has nothing to miss."""
        if self._has_metrics() or self._events_file.exists or any(self._seen.get(name) for name in _LOOKED_AT):
            self._had_files = True
        elif not os.path.isdir(self.path):
            return f"The folder {self.path} is gone or cannot be reached."
        elif self._had_files:
            return f"The folder {self.path} has no files of a run any more: it was emptied, or cannot be read."
        return None

    def _has_metrics(self) -> bool:
        seen = self._seen.get("metrics.jsonl") is not None
        return self._metrics_file.exists if self.has_all_metrics else seen


def _event(row: Mapping[str, Any]) -> Event:
    timestamp, event = number(row, "timestamp"), str(row.get("event"))
    values = {key: value for key, value in row.items() if key not in ("timestamp", "step", "event")}
    return Event(
        timestamp=math.nan if timestamp is None else timestamp,
        step=integer(row, "step"),
        event=event,
        values=hide(values) if event in _EVENTS_WITH_TEXT else values,
    )


def _is_alive(status: Mapping[str, Any] | None) -> bool:
    """Whether the process that wrote a status still runs; on another machine, whether it wrote it just now."""
    written, pid = number(status, "timestamp") or 0.0, integer(status, "pid")
    if text(status, "host") != socket.gethostname() or pid is None:
        return time.time() - written < _FRESH_S
    try:
        process = psutil.Process(pid)
        # one that began after the status was written has only the same number; a zombie has ended
        return process.create_time() <= written + 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):  # none has this number, or could have it
        return False
