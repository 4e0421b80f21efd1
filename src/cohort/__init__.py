"""Cohort trains language models with GRPO and its relatives.

`cohort.Trainer` trains from Python objects, step by step. `cohort.train(config)` does what `cohort train CONFIG.yaml`
does.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError, UserError
from cohort.processes import openmp  # noqa: F401  # before torch

if TYPE_CHECKING:
    from cohort.launch import train
    from cohort.launch.python_trainer import Trainer
    from cohort.records import ModelCall
    from cohort.run.history import History
    from cohort.run.log import StepReport
    from cohort.run.result import RunResult
    from cohort.trainer.evaluation import EvalResult

__all__ = [
    "EvalResult",
    "History",
    "ModelCall",
    "RunResult",
    "StepReport",
    "Trainer",
    "TrainingError",
    "UserError",
    "train",
]
__version__ = "0.1.0"

# Silence warnings that users cannot act on: those of torchao (which transformers imports if it is installed) about
# kernels for other GPUs and deprecations, of bitsandbytes about an optional kernel, of torch about a skipped cache.
for _talkative in (
    "torchao",
    "torch.utils._pytree",
    "bitsandbytes.backends.cpu.ops",
    "torch._functorch._aot_autograd.autograd_cache",
):
    logging.getLogger(_talkative).setLevel(logging.ERROR)


# torch takes seconds to import, so nothing that needs it is imported before it is used
_PLACES = {
    "EvalResult": "cohort.trainer.evaluation",
    "History": "cohort.run.history",
    "ModelCall": "cohort.records",
    "RunResult": "cohort.run.result",
    "StepReport": "cohort.run.log",
    "Trainer": "cohort.launch.python_trainer",
    "train": "cohort.launch.start",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
