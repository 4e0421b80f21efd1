"""Cohort trains language models with GRPO and its relatives.

`cohort.train(config)` does what `cohort train CONFIG.yaml` does.
"""

import logging
from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError, UserError

if TYPE_CHECKING:
    from cohort.launch import train
    from cohort.run_result import RunResult

__all__ = ["RunResult", "TrainingError", "UserError", "train"]
__version__ = "0.1.0"

# Nothing that a user can do anything about: torchao, which transformers imports where it is installed, tells of kernels
# for other GPUs and of PyTorch's future, bitsandbytes of a kernel that it does without, torch of what it does not cache
for _talkative in (
    "torchao",
    "torch.utils._pytree",
    "bitsandbytes.backends.cpu.ops",
    "torch._functorch._aot_autograd.autograd_cache",
):
    logging.getLogger(_talkative).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so nothing that needs it is imported before it is used
    if name == "train":
        from cohort.launch import train

        return train
    if name == "RunResult":
        from cohort.run_result import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
