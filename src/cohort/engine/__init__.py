"""The training engine: gradients of a batch, one optimizer step. It is given the loss and knows no algorithm."""

from cohort.engine.engine import ForwardBackwardResult, OptimResult, TrainEngine
from cohort.engine.schedule import learning_rate_factor

__all__ = ["ForwardBackwardResult", "OptimResult", "TrainEngine", "learning_rate_factor"]
