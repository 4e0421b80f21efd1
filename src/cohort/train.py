"""Say that `python -m cohort.train` is now `python -m cohort train`; `cohort.train` is the function."""

import sys

_ADVICE = "`python -m cohort.train CONFIG` is now `python -m cohort train CONFIG`, under torchrun too"

if __name__ == "__main__":
    print(f"error: {_ADVICE}", file=sys.stderr)
    raise SystemExit(2)
raise ImportError(f"cohort.train is a function, not a module; {_ADVICE}")
