"""Cohort trains language models with GRPO and its relatives.

`cohort.train(config)` does what `cohort train CONFIG.yaml` does.
"""

import logging
from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError, UserError

if TYPE_CHECKING:
    from cohort.launch import train
    from cohort.outcome import RunResult

__all__ = ["RunResult", "TrainingError", "UserError", "train"]
__version__ = "0.1.0"

# transformers imports torchao where it is installed, which tells of kernels for other GPUs and of PyTorch's future
for _talkative in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_talkative).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so nothing that needs it is imported before it is used
    if name == "train":
        from cohort.launch import train

        return train
    if name == "RunResult":
        from cohort.outcome import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
