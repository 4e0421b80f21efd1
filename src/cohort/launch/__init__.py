"""Start a run: in this process, in several on this machine, or as one rank under torchrun."""

from cohort.launch.start import train, train_rank

__all__ = ["train", "train_rank"]
