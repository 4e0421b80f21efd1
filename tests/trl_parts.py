"""TRL, where it is installed."""

import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace


@cache
def import_trl() -> SimpleNamespace:
    """What is used of TRL."""
    path = sys.path[:]
    # it would take the folder of our tests with vLLM for vLLM
    sys.path[:] = [folder for folder in path if not Path(folder, "vllm", "test_runs.py").exists()]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    try:
        from trl.experimental.gmpo import GMPOTrainer
        from trl.trainer import grpo_trainer
        from trl.trainer.utils import nanstd
    finally:
        sys.path[:] = path
    return SimpleNamespace(
        GMPOTrainer=GMPOTrainer, GRPOTrainer=grpo_trainer.GRPOTrainer, grpo_trainer=grpo_trainer, nanstd=nanstd
    )
