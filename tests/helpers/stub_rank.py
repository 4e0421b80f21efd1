"""A process of a run with the stub engine, as torchrun starts it: `python stub_rank.py run.yaml`."""

import sys

import cohort
from third_engine import known_engine

if __name__ == "__main__":
    with known_engine():
        cohort.train(sys.argv[1])
