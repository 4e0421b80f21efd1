"""TRL's names in front of Cohort: `from cohort.trl import GRPOConfig, GRPOTrainer`. TRL need not be installed."""

from cohort.trl.config import GRPOConfig
from cohort.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
