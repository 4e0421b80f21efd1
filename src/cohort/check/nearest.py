"""The nearest numbers with which a run starts. What is proposed was tried: the rule itself says that it starts."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from cohort.check.rules.start import BatchSizes, Start

GPUS = "GPUs"  # the name of the number of processes in a proposal
_LARGEST = 64  # of small counts that are tried; others go up to 4 times what is there
_MOST_TRIED = 512  # values on each side of a large number


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of one or two numbers."""

    changes: tuple[tuple[str, int], ...]
    distance: float  # sum over the changes of |log2(new / old)|

    def __str__(self) -> str:
        return " and ".join(f"{key}={value}" for key, value in self.changes)


def nearest_starts(
    start: Callable[[int, BatchSizes], Start], world_size: int, sizes: Mapping[str, int], *, limit: int = 6
) -> tuple[Proposal, ...]:
    """Changes of one number that make a run start, nearest first; of two where no single one does.

    Each number is changed to the nearest value below and above that starts, so that the proposals name batch sizes,
    accumulation, generations and GPUs, and not the same one over and over.
    """
    current = {GPUS: world_size, **sizes}
    started: dict[tuple[int, ...], bool] = {}

    def starts(changed: Mapping[str, int]) -> bool:
        values = {**current, **changed}
        key = tuple(values.values())
        if key not in started:
            result = start(values[GPUS], {name: value for name, value in values.items() if name != GPUS})
            started[key] = result.starts and result.steps_per_generation != 0
        return started[key]

    singles = [
        Proposal(((name, value),), _distance(value, current[name]))
        for name in current
        for value in _first_on_each_side(name, current[name], starts)
    ]
    if singles:
        return tuple(sorted(singles, key=lambda proposal: proposal.distance)[:limit])
    pairs = [
        Proposal(((a, value_a), (b, value_b)), _distance(value_a, current[a]) + _distance(value_b, current[b]))
        for a, b in combinations(current, 2)
        for value_a in _near(a, current[a])
        for value_b in _near(b, current[b])
        if starts({a: value_a, b: value_b})
    ]
    return tuple(sorted(pairs, key=lambda proposal: proposal.distance)[:limit])


def _distance(new: int, old: int) -> float:
    return abs(math.log2(new / max(old, 1)))


def _first_on_each_side(name: str, old: int, starts: Callable[[Mapping[str, int]], bool]) -> Iterator[int]:
    below = (value for value in range(old - 1, max(_lowest(name), old - _MOST_TRIED) - 1, -1) if starts({name: value}))
    above = (value for value in range(max(old + 1, _lowest(name)), _highest(old) + 1) if starts({name: value}))
    for side in (below, above):
        value = next(side, None)
        if value is not None:
            yield value


def _near(name: str, old: int) -> list[int]:
    """A few values around the current one: halves, doubles, and its neighbours."""
    values = {old - 1, old + 1, old // 2, old * 2, old * 4, old // 4, 2, 4, 8, 16}
    return sorted(value for value in values if _lowest(name) <= value <= _highest(old) and value != old)


def _lowest(name: str) -> int:
    return 2 if name in ("num_generations", "actor_rollout_ref.rollout.n") else 1


def _highest(old: int) -> int:
    return max(_LARGEST, min(4 * old, old + _MOST_TRIED))
