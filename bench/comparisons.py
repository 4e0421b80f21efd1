"""What is compared on a GPU: an error, its limit, and comparisons that cannot be made."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    error: float | None  # None: it could not be made, and `note` says why
    limit: float
    note: str = ""
    left_out: bool = False  # it cannot be made here, which is no failure

    @property
    def passed(self) -> bool:
        """Whether the error is within its limit; NaN is not."""
        return self.left_out if self.error is None else self.error <= self.limit

    def row(self) -> dict[str, Any]:
        """As JSON, which knows no NaN and no infinity."""
        row = asdict(self) | {"passed": self.passed}
        finite = self.error is None or math.isfinite(self.error)
        return row if finite else row | {"error": None, "note": f"the error is {self.error}"}


def attempt(name: str, limits: Mapping[str, float], compare: Callable[[], Mapping[str, float]]) -> Iterator[Check]:
    """One check for each error that a comparison returns, or one that failed where it raises.

    A warning that kernels "do not work here" is a failure: what took its place is not what was to be compared.

    Args:
        name: of the comparison.
        limits: of the errors, by what they are errors of.
        compare: returns the errors, under the same names.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*do not work here", category=RuntimeWarning)
            errors = compare()
    except Exception as reason:  # whatever is wrong here, the other checks are made
        yield Check(name=name, error=None, limit=0.0, note=first_line(reason))
        return
    for what, limit in limits.items():
        yield Check(name=f"{name}: {what}", error=errors[what], limit=limit)


def first_line(error: BaseException) -> str:
    """What is wrong, short enough for a table."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
