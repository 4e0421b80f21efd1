"""Cohort trains language models with GRPO and its relatives.

`cohort.train(config)` does what `cohort train CONFIG.yaml` does.
"""

import logging
from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError, UserError

if TYPE_CHECKING:
    from cohort.launch import train
    from cohort.run.result import RunResult

__all__ = ["RunResult", "TrainingError", "UserError", "train"]
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


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so nothing that needs it is imported before it is used
    if name == "train":
        from cohort.launch import train

        return train
    if name == "RunResult":
        from cohort.run.result import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
