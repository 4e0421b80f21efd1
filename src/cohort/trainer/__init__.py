"""Training: the wiring of a run and its loop."""

from cohort.trainer.loop import RunResult, train

__all__ = ["RunResult", "train"]
