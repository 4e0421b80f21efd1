"""The command line. Commands import what they need when they run, so that `--help` answers at once."""

import os

# Threads of one operation that wait for each other must sleep, not spin: with another program on the same cores,
# spinning made training six times slower. It has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cohort.cli.app import main
from cohort.startup import run_and_leave


def run() -> None:
    """Be the process of a command: start quickly, run it, and end quickly."""
    run_and_leave(main)


__all__ = ["main", "run"]
