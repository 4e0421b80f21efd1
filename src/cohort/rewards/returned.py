"""What a reward function returned: an iterable with one number or None per completion."""

import math
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cohort.rewards.describe import excerpt


@dataclass(frozen=True, slots=True)
class NotANumber:
    """A value of a child process that is not a number: only its description."""

    kind: str


def as_list(returned: Any, count: int) -> Any:
    """Return an iterable as a list, which runs a generator's code; anything else, text and mappings unchanged.

    Args:
        returned: what a function returned: any iterable, or an array of shape (N,) or (N, 1).
        count: expected number of values; at most one more is read of an iterable that may be endless.
    """
    if isinstance(returned, str | bytes | Mapping | Set):
        return returned
    with suppress(Exception):  # arrays of NumPy or PyTorch; a user's class may raise anything
        if math.prod(returned.shape) == len(returned):
            return returned.reshape(-1).tolist()
    if isinstance(returned, list | tuple):
        return list(returned)
    try:
        values = iter(returned)
    except TypeError:
        return returned
    return list(islice(values, count + 1))


def as_number(value: Any) -> float | None:
    """Return a value as a float: NaN for None, infinity for an integer that is too large, None if it is no number."""
    if value is None:
        return math.nan
    if not isinstance(value, bool | int | float):
        with suppress(Exception):  # arrays with a single element
            value = value.item()
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # an array of several elements, or a user's class
        return None


def describe_value(value: Any) -> str:
    """Describe a value with its type."""
    return value.kind if isinstance(value, NotANumber) else f"{excerpt(value)} ({type(value).__name__})"
