"""`cohort verify`: check a run's files for damage."""

from pathlib import Path
from typing import Annotated

import typer

from cohort.errors import UserError
from cohort.run.files import checkpoints, find_damage, format_line_numbers, read_manifest, read_metrics, read_summary


def verify(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Check a run's checkpoints against their checksums and read its other files, without changes.

    Exit codes: 0 intact, 1 damaged.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"RUN: {str(run)!r} is not a run folder; use the run.dir of a run")
    found = checkpoints(run / "checkpoints")
    lines = {path.name: _checkpoint(path) for path in found}
    _, bad = read_metrics(run / "metrics.jsonl")
    lines["metrics.jsonl"] = f"damaged: {format_line_numbers(bad)} cannot be read" if bad else "intact"
    if (run / "summary.json").exists():
        is_intact = read_summary(run / "summary.json") is not None
        lines["summary.json"] = "intact" if is_intact else "damaged: the number of steps is missing"
    for name, status in lines.items():
        typer.echo(f"{name}: {status}")
    if not found:
        typer.echo("no checkpoints")
    if any(status.startswith("damaged") for status in lines.values()):
        raise SystemExit(1)


def _checkpoint(path: Path) -> str:
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return f"damaged: {error}"
    if manifest is None:
        return "unknown: it has no manifest (written by an earlier version)"
    wrong = find_damage(path, manifest)
    return f"damaged: {'; '.join(wrong)}" if wrong else f"intact ({len(manifest)} files)"
