"""The events of a run, and who records them: `events.jsonl`, `status.json`, `metrics.jsonl` and the trackers."""

import contextlib
import importlib.util
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple

from cohort.errors import StopRequested, UserError, describe_error
from cohort.health.findings import HEALTH, Finding
from cohort.plan import RunSchedule
from cohort.ranks.stopping import LAUNCHER, NEVER_STOPPED, SAME_SIGNAL_S, RunStopped, StopSignals
from cohort.records import ScoredGroup
from cohort.run.provenance import command, commit, hide, hide_in_text, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one step."""

    steps_done: int
    metrics: Mapping[str, float]
    groups: Sequence[ScoredGroup]
    updates: Sequence[Mapping[str, float]] = ()  # metrics of each optimizer step; `metrics` has their means


class Display:
    """Receives the events of a run in order. The base class ignores them all."""

    def started(self, schedule: RunSchedule, *, steps_done: int) -> None:
        """The run starts, or resumes after `steps_done` steps."""

    def notify(self, text: str) -> None:
        """A message for the user."""

    def phase(self, name: str) -> None:
        """A phase of a step begins, as named in the metrics `time/{name}_s`, or "evaluation" or "checkpoint"."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def data_progress(self, name: str, done: float, total: float) -> None:
        """`done` of `total` of what `name` says is finished, before the first step."""

    def eval_progress(self, done: int, total: int) -> None:
        """`done` of `total` prompts are evaluated."""

    def reward_progress(self, name: str, done: int, total: int) -> None:
        """`done` of `total` verdicts of a reward are there."""

    def save_progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes of a model are written."""

    def saved(self, steps_done: int) -> None:
        """A checkpoint is written."""

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """An evaluation is done."""

    def health(self, findings: Sequence[Finding]) -> None:
        """What the rules find has changed. What the user should see comes by `notify` too, once."""

    def close(self) -> None:
        """The run has ended, for whatever reason."""


class Displays(Display):
    """Passes every event on to several displays, in order."""

    def __init__(self, *displays: Display):
        """`displays` are all of one run."""
        for name in vars(Display):
            if not name.startswith("_"):
                setattr(self, name, partial(_call_all, [getattr(display, name) for display in displays]))


def _call_all(methods: Sequence[Callable[..., None]], *arguments: object, **keywords: object) -> None:
    for method in methods:
        method(*arguments, **keywords)


EVENTS, STATUS = "events.jsonl", "status.json"
_STATUS_EVERY_S = 0.2  # minimum time between two writes
_MAX_CHARACTERS = 4000  # of a text


class RunLog(Display):
    """Appends events to `events.jsonl` and keeps the current phase in `status.json`.

    A file that cannot be written is left out: the run does not depend on it. A thread writes the status, so that a
    step never waits for it.
    """

    def __init__(self, folder: Path, *, processes: int, stop: StopSignals = NEVER_STOPPED):
        """Keep events without writing them until `begin`.

        Args:
            folder: run folder.
            processes: number of training processes.
            stop: names the signal that ends the run.
        """
        self._folder = folder
        self._processes = processes
        self._stop = stop
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
        launcher = os.environ.get(LAUNCHER)
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
        self._on_exit.enter_context(self._stop.on_end(lambda: self._end("stopped", "stop", reason=self._signal_name())))

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
            self._end("stopped", "stop", reason=self._reason(error))

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
        since = _now() if self._status is None else self._status["phase_since"]
        self._event("checkpoint", path=f"checkpoints/step-{steps_done}", seconds=round(_now() - since, 3))

    def evaluated(self, steps_done: int, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Record the evaluation."""
        self._event("evaluation")

    def health(self, findings: Sequence[Finding]) -> None:
        """Record how the run goes."""
        self._event(HEALTH, findings=[hide(finding.as_json()) for finding in findings])

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, RunStopped | StopRequested):
            return self._signal_name()
        return hide_in_text(describe_error(error, _MAX_CHARACTERS))

    def _signal_name(self) -> str:
        number = self._stop.requested(within_s=SAME_SIGNAL_S)
        return "signal" if number is None else number.name

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


def read_events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a kind in a run folder's `events.jsonl`, without lines that cannot be read."""
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(ValueError):  # a line that was cut off
                event = json.loads(line)
                found += [event] if isinstance(event, dict) and event.get("event") == name else []
    return found


def _now() -> float:
    """Unix time in seconds."""
    return round(time.time(), 3)


def check_loggers(names: Sequence[str]) -> None:
    """Check that the packages of all loggers are installed.

    Raises:
        UserError: a package is missing.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"run.log: {name!r}: the package is not installed; run `pip install 'cohort-rl[{name}]'` or remove it"
            )


class MetricsWriter:
    """Appends metrics as JSON lines, flushed immediately, and forwards them to loggers."""

    def __init__(self, folder: Path, *, log: Sequence[str], config: Mapping[str, Any], steps_done: int = 0):
        """Open for appending.

        Args:
            folder: run folder; holds metrics.jsonl and, for TensorBoard, tensorboard/.
            log: names of loggers.
            config: resolved configuration, for loggers that show it.
            steps_done: steps in the checkpoint; TensorBoard drops later ones.
        """
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._loggers = [_LOGGERS[name](folder, config, steps_done) for name in log]

    def alert(self, step: int, finding: Finding) -> None:
        """Show a finding in the loggers."""
        for logger in self._loggers:
            logger.alert(step, finding)

    def write(self, step: int, metrics: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        """Write the metrics of a step, or of an evaluation after it. NaN and infinity become null."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row = {"step": step, "kind": kind, "timestamp": round(time.time(), 3), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.log(step, {name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file and the loggers."""
        with contextlib.suppress(OSError):  # all lines are flushed; a full disk was reported then
            self._file.close()
        loggers, self._loggers = self._loggers, []
        for logger in loggers:
            logger.close()


class _Logger(NamedTuple):
    log: Callable[[int, Mapping[str, float]], None]  # the metrics of a step
    alert: Callable[[int, Finding], None]
    close: Callable[[], None]


def _tensorboard(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done + 1)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def alert(step: int, finding: Finding) -> None:
        writer.add_text(f"health/{finding.rule}", finding.sentence, step)

    return _Logger(log, alert, writer.close)


def _wandb(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    import wandb

    run = wandb.init(
        project="cohort", name=folder.name, id=_run_id(folder), config=dict(config), resume="allow", dir=str(folder)
    )
    # wandb's own step cannot go back, but a resumed run repeats steps: use a step metric
    run.define_metric("*", step_metric="step")

    def alert(step: int, finding: Finding) -> None:
        level = {"bad": "ERROR", "warning": "WARN"}.get(finding.level, "INFO")
        run.alert(title=finding.rule, text=f"step {step}: {finding.sentence}", level=level)

    return _Logger(lambda step, metrics: run.log({"step": step, **metrics}), alert, run.finish)


def _trackio(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    import trackio

    # trackio identifies a run by its name
    run = trackio.init(project="cohort", name=f"{folder.name}-{_run_id(folder)}", config=dict(config), resume="allow")

    def alert(step: int, finding: Finding) -> None:
        if hasattr(run, "alert"):  # versions below 0.18 have none
            run.alert(title=finding.rule, text=f"step {step}: {finding.sentence}")

    return _Logger(lambda step, metrics: run.log(dict(metrics), step=step), alert, run.finish)


def _run_id(folder: Path) -> str:
    """Unique id of the run in this folder, stable across resumes."""
    file = folder / ".run_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return file.read_text(encoding="utf-8")


_LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], _Logger]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
