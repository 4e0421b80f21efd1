"""Report unexpected exceptions: a short message on the console, the traceback in a file."""

import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cohort.run.provenance import command, untested_versions, versions

CODE = 70  # exit code: EX_SOFTWARE of sysexits.h

_run_dir: Path | None = None


def set_run_dir(run_dir: Path) -> None:
    """Write crash reports of this process to this run's folder, if it exists."""
    global _run_dir
    _run_dir = run_dir


@contextmanager
def report_crash(*others: type[Exception]) -> Iterator[None]:
    """Turn unexpected exceptions into a message and exit code 70.

    Args:
        others: exceptions to let through; the caller handles them.
    """
    try:
        yield
    except others:
        raise
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(_message(error, _write(error)), file=sys.stderr)
        raise SystemExit(CODE) from None


def _message(error: Exception, file: Path | None) -> str:
    last = traceback.format_exception_only(error)[-1].strip()
    where = f"The traceback is in {file}" if file else "--debug shows the traceback"
    message = (
        f"error: internal error: {last[:500]}\nThis is a bug in Cohort. {where}. Please open an issue with the "
        f"traceback, the command and the configuration"
    )
    return "\n".join([message, *untested_versions()])


def _write(error: Exception) -> Path | None:
    """Write the traceback to the run's folder or the temporary folder; None if neither is writable."""
    name = f"internal-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    packages = [f"{package} {version}" for package, version in versions().items()]
    text = "\n".join([platform.platform(), *packages, f"command: {command()}", "", *traceback.format_exception(error)])
    folders = [_run_dir / "logs"] if _run_dir is not None and os.path.isdir(_run_dir) else []
    with suppress(OSError):  # there is no temporary folder
        folders.append(Path(tempfile.gettempdir()))
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
            return folder / name
    return None
