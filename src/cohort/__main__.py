"""`python -m cohort` is `cohort`."""

from cohort.cli import main

if __name__ == "__main__":
    main()
