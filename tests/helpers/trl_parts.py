"""TRL, which `make test-extras` installs."""

import os
from functools import cache
from types import SimpleNamespace


@cache
def import_trl() -> SimpleNamespace:
    """What is used of TRL."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer import grpo_trainer
    from trl.trainer.utils import nanstd

    return SimpleNamespace(
        GMPOTrainer=GMPOTrainer, GRPOTrainer=grpo_trainer.GRPOTrainer, grpo_trainer=grpo_trainer, nanstd=nanstd
    )
