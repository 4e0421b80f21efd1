"""The training engine: forward_backward and optimizer steps. The loss is an argument, so it knows no algorithm."""

from cohort.learner.budget_search import WorstCaseShard, find_budget
from cohort.learner.loss import PerTokenLoss
from cohort.learner.memory_fallback import TokenBudget, must_fit
from cohort.learner.optimizer import check_optimizer, check_weights, learning_rate_factor
from cohort.learner.train_engine import CriticEngine, OptimResult, TrainEngine, TrainResult

__all__ = [
    "CriticEngine",
    "OptimResult",
    "PerTokenLoss",
    "TokenBudget",
    "TrainEngine",
    "TrainResult",
    "WorstCaseShard",
    "check_optimizer",
    "check_weights",
    "find_budget",
    "learning_rate_factor",
    "must_fit",
]
