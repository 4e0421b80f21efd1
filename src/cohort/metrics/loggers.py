"""Write metrics to `metrics.jsonl` and the configured loggers."""

import contextlib
import importlib.util
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cohort.errors import UserError


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

    def write(self, step: int, metrics: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        """Write the metrics of a step, or of an evaluation after it. NaN and infinity become null."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row = {"step": step, "kind": kind, "timestamp": round(time.time(), 3), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for log, _ in self._loggers:
            log(step, {name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file and the loggers."""
        with contextlib.suppress(OSError):  # all lines are flushed; a full disk was reported then
            self._file.close()
        for _, close in self._loggers:
            close()


_Logger = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def _tensorboard(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done + 1)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    import wandb

    run = wandb.init(
        project="cohort", name=folder.name, id=_run_id(folder), config=dict(config), resume="allow", dir=str(folder)
    )
    # wandb's own step cannot go back, but a resumed run repeats steps: use a step metric
    run.define_metric("*", step_metric="step")
    return lambda step, metrics: run.log({"step": step, **metrics}), run.finish


def _trackio(folder: Path, config: Mapping[str, Any], steps_done: int) -> _Logger:
    import trackio

    # trackio identifies a run by its name
    run = trackio.init(project="cohort", name=f"{folder.name}-{_run_id(folder)}", config=dict(config), resume="allow")
    return lambda step, metrics: run.log(dict(metrics), step=step), run.finish


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
