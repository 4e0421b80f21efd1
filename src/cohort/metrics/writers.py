"""Where metrics go: `metrics.jsonl` always, and the loggers a run asks for."""

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import UserError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed.

    Raises:
        UserError: names the package and how to install it.
    """
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"run.log: {name!r}: the package is not installed; run `pip install 'cohort-rl[{name}]'` or remove it"
            )


class MetricsWriter:
    """Appends one JSON object per line, flushed at once, and forwards to the loggers."""

    def __init__(self, folder: Path, *, log: Sequence[str], config: Mapping[str, Any]):
        """Open for appending.

        Args:
            folder: the run folder; holds metrics.jsonl and, for tensorboard, tensorboard/.
            log: names of loggers.
            config: the resolved configuration, for loggers that show it.
        """
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._loggers = [_LOGGERS[name](folder, config) for name in log]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of the state after `step` steps. NaN, which JSON does not know, becomes null."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for log, _ in self._loggers:
            log(step, {name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file and the loggers."""
        self._file.close()
        for _, close in self._loggers:
            close()


_Logger = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def _tensorboard(folder: Path, config: Mapping[str, Any]) -> _Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb_like(package: str) -> Callable[[Path, Mapping[str, Any]], _Logger]:
    def start(folder: Path, config: Mapping[str, Any]) -> _Logger:
        module = importlib.import_module(package)
        # the folder's name is the run's id, so that a resumed run goes on in the same curves
        run = module.init(project="cohort", name=folder.name, config=dict(config), resume="allow")
        return lambda step, metrics: run.log(dict(metrics), step=step), run.finish

    return start


_LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], _Logger]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb_like("wandb"),
    "trackio": _wandb_like("trackio"),
}
