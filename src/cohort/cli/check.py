"""`cohort check` and `cohort convert`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cohort.cli.command import Debug
from cohort.config.hardware import MAX_PROCESSES
from cohort.errors import UserError

if TYPE_CHECKING:
    from cohort_check import FileReport

FrameworkVersion = Annotated[
    str | None,
    typer.Option(
        "--framework-version",
        "--trl-version",
        metavar="VERSION",
        help="Version of TRL (also for Open-R1), ms-swift or verl to check against, such as 0.18.0. Default: the "
        "file's own, else the newest known (Open-R1: the one it pins).",
    ),
]
LaunchedWith = Annotated[
    str | None,
    typer.Option(
        "--launch",
        metavar="COMMAND",
        help="Launch command, if the files do not contain it, such as 'accelerate launch --num_processes 7'.",
    ),
]
Run = Annotated[
    bool,
    typer.Option(
        "--run",
        help="Run the Python script, with the arguments of --launch, up to trainer.train(): exact, where reading it "
        "is a guess. No weights are loaded.",
    ),
]


def check(
    files: Annotated[list[Path], typer.Argument(help="Cohort, TRL, Open-R1, ms-swift or verl; docs/check.md.")],
    world_sizes: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Numbers of GPUs to check. Default: 1 to 16, 24, 32, 64.")
    ] = None,
    framework_version: FrameworkVersion = None,
    launch: LaunchedWith = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
    fix: Annotated[bool, typer.Option(help="Write the nearest valid values into the files.")] = False,
    run: Run = False,
    debug: Debug = False,
) -> None:
    """Check configurations before launch: whether they start, on how many GPUs, and what works instead."""
    from cohort_check import WORLD_SIZES, check_file

    sizes = WORLD_SIZES if world_sizes is None else _sizes(world_sizes)
    version = _version(framework_version)
    options: dict[str, Any] = {"framework_version": version, "launched_with": launch}
    if run and fix:
        raise UserError("--run: judges the arguments that a script has when it runs, which --fix cannot write; use one")
    ran = [_ran(file, launch) if run else None for file in files]
    pairs = zip(files, ran, strict=True)
    reports = [check_file(file, world_sizes=sizes, ran=found, **options) for file, found in pairs]
    if fix:
        reports = [
            _fixed(report, file, world_sizes=sizes, **options) for report, file in zip(reports, files, strict=True)
        ]
    if json_:
        typer.echo(json.dumps([report.as_json() for report in reports], indent=2))
    else:
        from rich.console import Console

        from cohort_check.report import print_reports

        print_reports(reports, Console())
    if any(report.failed for report in reports):
        raise typer.Exit(1)


def convert(
    file: Annotated[Path, typer.Argument(help="Configuration of TRL, Open-R1, ms-swift or verl.")],
    framework_version: FrameworkVersion = None,
    launch: LaunchedWith = None,
    run: Run = False,
    debug: Debug = False,
) -> None:
    """Convert to an equivalent Cohort configuration. Exit code 1 if it leaves decisions open (`decide_first`)."""
    import yaml

    from cohort_check import convert_file

    if run:
        from cohort.trl.scripts import as_yaml
        from cohort_check.readers.pins import pinned_version

        ran, pin = _ran(file, launch), pinned_version("trl", file, file.read_text(encoding="utf-8"))
        text = as_yaml(file, ran, pinned=f"{pin.value} ({pin.where})" if pin else "")
    else:
        text = convert_file(file, framework_version=_version(framework_version), launched_with=launch)
    typer.echo(text, nl=False)
    if decisions := yaml.safe_load(text).get("decide_first"):
        typer.echo(f"decide_first: {len(decisions)} open; cohort train refuses until they are settled", err=True)
        raise typer.Exit(1)


def _ran(file: Path, launch: str | None) -> dict[str, Any]:
    """Run a script of TRL with the arguments of its launch command, and return what it would train."""
    from cohort.trl.scripts import run_script
    from cohort_check.readers import read_arguments

    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"--run: {file}: must be a Python script; without --run other files are read")
    processes, arguments = (1, []) if launch is None else read_arguments(launch, file)
    return run_script(file, arguments, processes=processes)


def _fixed(report: "FileReport", file: Path, **options: Any) -> "FileReport":
    """Write a report's fixes and check the file again."""
    from cohort_check import check_file
    from cohort_check.fix import fix_file

    if not report.failed or report.launch is None:
        return report
    written, by_hand = fix_file(file, [finding for run in (report, *report.others) for finding in run.findings])
    for change in written:
        typer.echo(f"{file}: fixed {change}", err=True)
    for change in by_hand:
        typer.echo(f"{file}: fix by hand: {change}", err=True)
    return check_file(file, **options)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_PROCESSES for part in parts):
        raise UserError(
            f"--world-sizes: {text!r} is not a list of numbers from 1 to {MAX_PROCESSES:,}; use one such as 1,2,3"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _version(text: str | None) -> str | None:
    if text is not None and not (text[:1].isdecimal() and len(text.split(".")) >= 2 and text.split(".")[1].isdecimal()):
        raise UserError(f"--framework-version: {text!r} is not a version; use one such as 0.18.0 or 1.16")
    return text
