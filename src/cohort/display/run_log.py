"""Record the events of a run in its folder, for programs that watch it: `events.jsonl` and `status.json`."""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from cohort import stopping
from cohort.display.events import Display, StepReport
from cohort.provenance import command, commit
from cohort.records import ScoredGroup
from cohort.redaction import hide_in_text
from cohort.versions import versions

EVENTS, STATUS = "events.jsonl", "status.json"
_STATUS_EVERY_S = 0.2  # minimum time between two writes
_MAX_CHARACTERS = 4000  # of a text


class RunLog(Display):
    """Appends events to `events.jsonl` and keeps the current phase in `status.json`.

    A file that cannot be written is left out: the run does not depend on it. A thread writes the status, so that a
    step never waits for it.
    """

    def __init__(self, folder: Path, *, processes: int):
        """Keep events without writing them until `begin`.

        Args:
            folder: run folder.
            processes: number of training processes.
        """
        self._folder = folder
        self._processes = processes
        self._status: dict[str, Any] | None = None  # replaced as a whole: another thread reads it; None before `begin`
        self._early: list[str] = []  # notes before `begin`
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_changes, name="status", daemon=True)
        self._on_exit = ExitStack()

    def begin(self, *, steps_done: int, num_steps: int, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Begin to write: the run folder is this run's.

        Args:
            steps_done: steps after which it starts or resumes.
            num_steps: its steps in all.
            files: hashes of the files with the user's functions.
        """
        now, pid, host = _now(), os.getpid(), socket.gethostname()
        self._status = {
            "timestamp": now,
            "pid": pid,
            "host": host,
            "step": steps_done,
            "steps": num_steps,
            "phase": "starting",
            "phase_since": now,
            "done": None,
            "total": None,
            "started": now,
        }
        launcher = os.environ.get(stopping.LAUNCHER)
        self._event(
            "start",
            steps_done=steps_done,
            steps=num_steps,
            pid=pid,
            host=host,
            command=command(int(launcher) if launcher else None),
            versions=versions(),
            commit=commit(),
            processes=self._processes,
            files=dict(files),
        )
        for text in self._early:
            self.notify(text)
        self._changed.set()
        self._thread.start()
        self._on_exit.enter_context(stopping.on_kill(lambda: self._end("stopped", "stop", reason=_signal_name())))

    def __enter__(self) -> "RunLog":
        """Record how the run within the context ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record the end."""
        self._on_exit.close()
        if error is None:
            self._end("finished", "end")
        else:
            self._end("stopped", "stop", reason=_reason(error))

    def notify(self, text: str) -> None:
        """Record a warning."""
        if self._status is None:
            self._early.append(text)
        self._event("warning", text=hide_in_text(text[:_MAX_CHARACTERS]))

    def phase(self, name: str) -> None:
        """Show the phase, as yet without progress."""
        self._update(phase=name, phase_since=_now(), done=None, total=None)

    def step(self, report: StepReport) -> None:
        """Count the step."""
        self._update(step=report.steps_done)

    def reward_progress(self, name: str, done: int, total: int) -> None:
        """Show the progress of a step's rewards."""
        self._progress("reward", done, total)

    def eval_progress(self, done: int, total: int) -> None:
        """Show the progress of an evaluation."""
        self._progress("evaluation", done, total)

    def save_progress(self, done: int, total: int) -> None:
        """Show the progress of a save."""
        self._progress("checkpoint", done, total)

    def saved(self, steps_done: int) -> None:
        """Record the checkpoint."""
        self._event("checkpoint", path=f"checkpoints/step-{steps_done}")

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Record the evaluation."""
        self._event("evaluation")

    def _progress(self, phase: str, done: int, total: int) -> None:
        if self._status is not None and self._status["phase"] == phase:  # an evaluation has rewards too
            self._update(done=done, total=total)

    def _update(self, **changes: Any) -> None:
        if self._status is not None:
            self._status = {**self._status, **changes}
            self._changed.set()

    def _end(self, phase: str, event: str, **values: Any) -> None:
        if self._status is None or self._ended.is_set():
            return
        self.phase(phase)
        self._ended.set()
        self._changed.set()
        self._thread.join(1.0)
        self._event(event, **values)
        if not self._thread.is_alive():  # else it waits for the disk
            self._write_status()

    def _event(self, name: str, **values: Any) -> None:
        if self._status is None:
            return
        event = {"timestamp": _now(), "step": self._status["step"], "event": name, **values}
        with suppress(OSError), (self._folder / EVENTS).open("a+b", buffering=0) as file:
            partial = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"  # the run was killed there
            file.write(b"\n" * bool(partial) + json.dumps(event).encode() + b"\n")

    def _write_changes(self) -> None:
        while not self._ended.is_set():
            self._changed.wait()
            self._changed.clear()
            self._write_status()
            self._ended.wait(_STATUS_EVERY_S)

    def _write_status(self) -> None:
        """Replace the status file, without flushing it to disk: after a power failure it is of no use."""
        partial = self._folder / f".{STATUS}.partial"
        with suppress(OSError):
            partial.write_text(json.dumps({**(self._status or {}), "timestamp": _now()}) + "\n", encoding="utf-8")
            partial.replace(self._folder / STATUS)


def _now() -> float:
    """Unix time in seconds."""
    return round(time.time(), 3)


def _reason(error: BaseException) -> str:
    if isinstance(error, stopping.RunStopped | stopping.StopRequested) and stopping.requested() is not None:
        return _signal_name()
    lines = str(error).strip().splitlines()
    return hide_in_text(": ".join([type(error).__name__, *lines[:1]])[:_MAX_CHARACTERS])


def _signal_name() -> str:
    number = stopping.requested()
    return "signal" if number is None else number.name
