"""`cohort verify`: check a run's files for damage."""

from pathlib import Path
from typing import Annotated

import typer

from cohort.errors import UserError
from cohort.run_files import checkpoints, find_damage, format_line_numbers, read_manifest, read_metrics, read_summary


def verify(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Check a run's checkpoints against their checksums and read its other files, without changes.

    Exit codes: 0 intact, 1 damaged.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"RUN: {str(run)!r} holds no run; give the run.dir of one")
    found = checkpoints(run / "checkpoints")
    lines = {path.name: _checkpoint(path) for path in found}
    _, bad = read_metrics(run / "metrics.jsonl")
    lines["metrics.jsonl"] = f"damaged: {format_line_numbers(bad)} cannot be read" if bad else "whole"
    if (run / "summary.json").exists():
        whole = read_summary(run / "summary.json") is not None
        lines["summary.json"] = "whole" if whole else "damaged: it does not say how many steps there were"
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
        return "not known: it has no manifest, as those of earlier versions"
    wrong = find_damage(path, manifest)
    return f"damaged: {'; '.join(wrong)}" if wrong else f"whole ({len(manifest)} files)"
