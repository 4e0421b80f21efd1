"""Cohort trains language models with GRPO and its relatives.

`cohort.train(config)` does what `cohort train CONFIG.yaml` does.
"""

from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError, UserError

if TYPE_CHECKING:
    from cohort.trainer import RunResult, train

__all__ = ["RunResult", "TrainingError", "UserError", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, so nothing that needs it is imported before it is used
    if name in ("train", "RunResult"):
        from cohort import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
