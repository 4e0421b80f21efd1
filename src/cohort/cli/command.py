"""What all commands have in common: options, and the messages and exit codes that they end with."""

import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cohort.config import Config
from cohort.errors import TrainingError, UserError, explained_in
from cohort.run.provenance import command, untested_versions, versions

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Change keys of the file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]

INTERNAL_ERROR = 70  # exit code: EX_SOFTWARE of sysexits.h

_run: tuple[Config, int] | None = None  # the run that this process starts, and the size of its metrics before


def set_run(config: Config) -> None:
    """Write crash reports of this process to this run's folder, if it exists, and check the machine if it fails."""
    global _run
    _run = config, _num_metrics_bytes(config)


class Commands(TyperGroup):
    """Run a command and turn expected exceptions into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Exit codes: 1 the run failed, 2 user error, 130 interrupted before the run began."""
        try:
            return super().invoke(ctx)
        except (UserError, TrainingError) as error:
            if "--debug" in sys.argv:
                traceback.print_exc()
            else:
                # launchers tell a rank that caused a failure from one that noticed it by the name
                name = f"{type(error).__name__}: " if is_rank() and isinstance(error, TrainingError) else ""
                notes = getattr(error, "__notes__", [])
                typer.echo("\n".join([f"error: {name}{error}", *notes, *untested_versions()]), err=True)
            _print_failed_checks(error)
            raise SystemExit(2 if isinstance(error, UserError) else 1) from None
        except OSError as error:
            if "--debug" in sys.argv or (message := _describe_place(error)) is None:
                raise
            typer.echo(f"error: {message}", err=True)
            _print_failed_checks(error)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise SystemExit(130) from None


def _print_failed_checks(error: Exception) -> None:
    """After an error that ended a run before its first step, print what fails of the quick checks of `cohort doctor`.

    Checks that the error names itself are left out.
    """
    if _run is None:
        return
    with suppress(Exception, KeyboardInterrupt):
        from cohort.cli.doctor import color
        from cohort.doctor import failed_checks_text
        from cohort.ranks.stopping import LAUNCHER

        config, num_bytes_before = _run
        is_another_rank = os.environ.get("RANK", "0") != "0" or LAUNCHER in os.environ  # the launcher prints them
        if is_another_rank or _num_metrics_bytes(config) > num_bytes_before:
            return

        if (text := failed_checks_text(error, config, style=color)) is not None:
            typer.echo(text, err=True)


def _num_metrics_bytes(config: Config) -> int:
    try:
        return (Path(config.run.dir) / "metrics.jsonl").stat().st_size
    except OSError:
        return 0


def is_rank() -> bool:
    """Whether this process is a rank that torchrun or `cohort train` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _describe_place(error: OSError) -> str | None:
    """Say what is wrong with the files and folders here; None if an error has another cause."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: permission denied; give a path that this user may use, or change its permissions"
    try:
        tempfile.gettempdir()
    except FileNotFoundError as none:
        if str(error) == str(none):
            return "no folder for temporary files can be written to; set TMPDIR to one that can"
    return None


@contextmanager
def report_failures() -> Iterator[None]:
    """Turn output that cannot be written into a message, and unexpected exceptions into one with a crash report.

    Exit codes: 1 and 70.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and _output_is_lost():
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(_message(error, _write_report(error)), file=sys.stderr)
        _print_failed_checks(error)
        raise SystemExit(INTERNAL_ERROR) from None


def _output_is_lost() -> bool:
    """Whether standard output takes no other line either; one that is closed takes every line."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _message(error: Exception, file: Path | None) -> str:
    last = traceback.format_exception_only(error)[-1].strip()
    where = f"The traceback is in {file}" if file else "--debug shows the traceback"
    message = (
        f"error: internal error: {last[:500]}\nThis is a bug in Cohort. {where}. Please open an issue with the "
        f"traceback, the command and the configuration"
    )
    return "\n".join([message, *filter(None, [explained_in(last)]), *untested_versions()])


def _write_report(error: Exception) -> Path | None:
    """Write the traceback to the run's folder or the temporary folder; None if neither is writable."""
    name = f"internal-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    packages = [f"{package} {version}" for package, version in versions().items()]
    text = "\n".join([platform.platform(), *packages, f"command: {command()}", "", *traceback.format_exception(error)])
    run_dir = _run and _run[0].run.dir
    folders = [Path(run_dir) / "logs"] if run_dir and os.path.isdir(run_dir) else []
    with suppress(OSError):  # there is no temporary folder
        folders.append(Path(tempfile.gettempdir()))
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
            return folder / name
    return None
