"""The training engine: forward_backward and optimizer steps. The loss is an argument, so it knows no algorithm."""

from cohort.engine.budget_search import WorstCaseShard, find_budget
from cohort.engine.critic_engine import CriticEngine
from cohort.engine.loss import PerTokenLoss
from cohort.engine.lr_schedule import learning_rate_factor
from cohort.engine.optimizer import check_optimizer, check_weights
from cohort.engine.out_of_memory import TokenBudget, must_fit
from cohort.engine.train_engine import OptimResult, TrainEngine, TrainResult

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
