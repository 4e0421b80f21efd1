"""Command-line interface. Commands import lazily to keep `--help` fast."""

import os

# OpenMP threads must sleep, not spin, while they wait: with another program on the same cores, spinning made training
# six times slower. Must be set before importing torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cohort.cli.app import main
from cohort.processes.this_process import run_and_exit


def run() -> None:
    """Entry point of the `cohort` command."""
    run_and_exit(main)


__all__ = ["main", "run"]
