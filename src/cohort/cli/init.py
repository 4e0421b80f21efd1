"""`cohort init`: a folder with a first run."""

from pathlib import Path
from typing import Annotated

import typer

from cohort.cli.command import Debug
from cohort.errors import UserError


def init(
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    task: Annotated[str | None, typer.Option(help="math (the default), tools or code: what the run learns.")] = None,
    script: Annotated[
        Path | None, typer.Option("--from", metavar="SCRIPT", help="Start from a script of TRL, as `cohort convert`.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a first run into a new folder: configuration, reward and 20 rows. It trains at once, on a small model."""
    from cohort.demo.init import write_converted, write_starter

    if script is not None and task is not None:
        raise UserError("--task has no effect with --from, whose script says what the run learns; remove one of them")
    if script is None:
        files = write_starter(folder, task=task or "math")
    else:
        from cohort_check import convert_file

        files = write_converted(folder, script, convert_file(script))
    typer.echo(f"wrote {', '.join(files)} and README.md into {folder}")
    typer.echo(f"Next: cohort train {folder / 'run.yaml'}" if script is None else f"Read {folder / 'run.yaml'} first.")
