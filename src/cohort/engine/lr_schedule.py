"""Learning-rate schedule: a pure function of the number of updates done, so checkpoints need no scheduler state."""

import math
from typing import Literal


def learning_rate_factor(
    updates_done: int,
    *,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"],
    minimum: float = 0.0,
) -> float:
    """Return the next update's factor of the peak learning rate: linear warmup, then constant or decay to `minimum`.

    Args:
        updates_done: optimizer steps done before this one.
        warmup: warmup steps; the first has factor 1 / warmup.
        total: total optimizer steps of the run.
        schedule: schedule after the warmup.
        minimum: where the linear and the cosine schedule end, after all updates.
    """
    if updates_done < warmup:
        return (updates_done + 1) / warmup
    progress = (updates_done - warmup) / max(1, total - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - minimum) * progress
        case "cosine":
            return minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
