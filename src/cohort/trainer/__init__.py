"""Training: the wiring of a run, its loop, and the processes that it runs in."""

from cohort.trainer.loop import train
from cohort.trainer.process import run_rank

__all__ = ["run_rank", "train"]
