"""`cohort reward`: score recorded completions again, without a model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cohort.cli.command import Debug, Overrides
from cohort.config import load_config
from cohort.errors import UserError


def reward(
    config: Annotated[Path, typer.Argument(help="YAML file, or the config.yaml of a run.")],
    overrides: Overrides = None,
    completions: Annotated[
        Path | None,
        typer.Option(help="Parquet or JSONL file with a column `completion`: a run's, or your own."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Compute only the reward of this name.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Completions to show for each disagreement.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Score recorded completions again with the rewards of a configuration: values, disagreements and times."""
    if completions is None:
        raise UserError("--completions is missing; give a file, such as runs/first/completions/step-000010.parquet")
    settings = load_config(config, overrides or ())
    from cohort.cli.rescore import rescore
    from cohort.display import ProgressBar

    with ProgressBar("judging") as bar:
        rescored = rescore(
            settings,
            completions,
            only=only or (),
            examples=examples,
            on_progress=lambda name, done, total: bar.update(done, total),
            on_data_progress=bar.data_progress,
        )
    typer.echo(json.dumps(asdict(rescored), indent=2) if json_ else rescored.as_text())
