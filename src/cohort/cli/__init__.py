"""Command-line interface. Commands import lazily to keep `--help` fast."""

from cohort.cli.app import main
from cohort.processes.this_process import run_and_exit


def run() -> None:
    """Entry point of the `cohort` command."""
    run_and_exit(main)


__all__ = ["main", "run"]
