"""`python -m cohort` is `cohort`."""

from cohort.cli import run

if __name__ == "__main__":
    run()
