"""Where a run comes from: command and commit."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from cohort.redaction import hide_in_arguments


def command(launcher: int | None = None) -> str:
    """Return the command of this process, or of its launcher if there is one, without secrets.

    Args:
        launcher: process id.
    """
    arguments = sys.orig_argv
    if launcher is not None:
        with suppress(psutil.Error):  # it has ended
            arguments = psutil.Process(launcher).cmdline()
    if len(arguments) > 1 and Path(arguments[1]).name == "cohort":  # the interpreter of an installed script
        arguments = arguments[1:]
    return shlex.join(hide_in_arguments([Path(arguments[0]).name, *arguments[1:]]))


def commit() -> str | None:
    """Return the commit of the working directory, or None if it is not in a Git repository."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
