"""Run the `cohort` command as `python -m cohort`."""

from cohort.cli import run

if __name__ == "__main__":
    run()
