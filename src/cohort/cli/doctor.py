"""`cohort doctor`: what this machine can do, and what is missing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cohort.cli.command import Debug, Overrides
from cohort.config import load_config
from cohort.errors import UserError

if TYPE_CHECKING:
    from cohort.doctor import Status

_COLORS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of a run to check for. Default: what any run needs.")
    ] = None,
    overrides: Overrides = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Check what this machine can do and what is missing, with the fix for each problem.

    Exit codes: 0 nothing fails, 1 something does.
    """
    if config is not None and "=" in str(config) and not config.exists():
        raise UserError(f"{config}: overrides need a configuration file before them: cohort doctor run.yaml {config}")
    settings = load_config(config, overrides or ()) if config is not None else None
    from cohort.doctor import examine

    findings = []
    for finding in examine(settings):
        findings.append(finding)
        if not json_:
            typer.echo(finding.text(color))
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    if json_:
        typer.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        typer.echo(f"\n{len(findings)} checks: {failed} failed, {warned} with warnings")
    if failed:
        raise typer.Exit(1)


def color(text: str, status: "Status") -> str:
    """Color the status of a finding."""
    return typer.style(text, fg=_COLORS[status])
