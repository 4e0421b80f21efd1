"""Training: the wiring of a run, its loop, and the processes that it runs in."""

from cohort.trainer.process import run_rank
from cohort.trainer.run import train

__all__ = ["run_rank", "train"]
