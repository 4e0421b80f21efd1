"""Training: setup of a run, the training loop, and the workers."""

from cohort.trainer.process import run_rank
from cohort.trainer.run import train

__all__ = ["run_rank", "train"]
