"""Starting a run: in this process, in several on this machine, or as one rank of what torchrun has started."""

from cohort.launch.start import train

__all__ = ["train"]
