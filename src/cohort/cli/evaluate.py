"""Run `cohort eval` and print or write its results."""

import json
import math
import os
from functools import partial
from pathlib import Path

import typer

from cohort.config import Config
from cohort.display import ProgressBar
from cohort.errors import UserError
from cohort.run.completions import write_completions_file
from cohort.trainer.without_training import evaluate_model


def run_eval(config: Config, *, out: Path | None, as_json: bool) -> None:
    """Evaluate, print the metrics, and write the completions to `out` if given."""
    if out is not None:
        _check_can_be_written(out)
    with ProgressBar("evaluating") as progress:
        result = evaluate_model(config, on_progress=progress.update, notify=partial(typer.echo, err=True))
    metrics = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    if out is not None:
        write_completions_file(out, step=0, groups=result.groups)
    if as_json:
        typer.echo(json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {value:.4g}")


def _check_can_be_written(file: Path) -> None:
    """Check that `file` is writable before the evaluation starts.

    Raises:
        UserError: it is not.
    """
    if file.is_dir():
        raise UserError(f"--out: {str(file)!r} is a folder; give a file, such as {str(file / 'completions.parquet')!r}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {str(file)!r} cannot be written: {error.strerror}") from error
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"--out: {str(file)!r} cannot be written: no permission to write in {str(file.parent)!r}")
