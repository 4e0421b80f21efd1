"""The nearest numbers with which a run starts. What is proposed was tried: the rule itself says that it starts."""

import math
from collections.abc import Callable, Mapping

from cohort.check.rules.start import BatchSizes, Start

GPUS = "GPUs"  # the name of the number of processes in a proposal
_LARGEST = 64  # of small counts that are tried; others go up to 4 times what is there
_MOST_TRIED = 512  # values on each side of a large number


def nearest_starts(
    start: Callable[[int, BatchSizes], Start], world_size: int, sizes: Mapping[str, int], *, limit: int = 6
) -> tuple[tuple[str, int], ...]:
    """Changes of one number, (name, value), that make a run start, sorted by the distance |log2(new / old)|.

    Each number is changed to the nearest value below and above that starts, so that the proposals name batch sizes,
    accumulation, generations and GPUs, and not the same one over and over.
    """
    current = {GPUS: world_size, **sizes}

    def starts(name: str, value: int) -> bool:
        values = {**current, name: value}
        result = start(values.pop(GPUS), values)
        return result.starts and result.steps_per_generation != 0

    proposals = []
    for name, old in current.items():
        lowest = 2 if name in ("num_generations", "actor_rollout_ref.rollout.n") else 1
        highest = max(_LARGEST, min(4 * old, old + _MOST_TRIED))
        for side in (range(old - 1, max(lowest, old - _MOST_TRIED) - 1, -1), range(max(old + 1, lowest), highest + 1)):
            value = next((value for value in side if starts(name, value)), None)
            if value is not None:
                proposals.append((name, value))
    return tuple(sorted(proposals, key=lambda new: abs(math.log2(new[1] / max(current[new[0]], 1))))[:limit])
