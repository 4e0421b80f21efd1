"""The learning rate as a pure function of the number of updates done: nothing to save, nothing to restore."""

import math
from typing import Literal


def learning_rate_factor(
    updates_done: int, *, warmup: int, total: int, schedule: Literal["constant", "linear", "cosine"]
) -> float:
    """Factor of the peak learning rate for the next update: linear warm-up, then constant or decay towards 0.

    Args:
        updates_done: optimizer steps before this one.
        warmup: optimizer steps of warm-up; the first of them has factor 1 / warmup.
        total: optimizer steps of the run.
        schedule: what follows the warm-up.
    """
    if updates_done < warmup:
        return (updates_done + 1) / warmup
    progress = (updates_done - warmup) / max(1, total - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
