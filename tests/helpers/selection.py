"""What `make test` runs and what only `make test-all` does."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"  # Hypothesis profiles: of `make test`, and of `make test-all`


def slow(reason: str) -> pytest.MarkDecorator:
    """Leave a test, or one of its parameters, to `make test-all`; `reason` says what `make test` has in its place."""
    return pytest.mark.slow(reason)


def mostly_slow(values: Iterable[Any], *quick: Any, reason: str) -> list[Any]:
    """Parameters, or tuples of them, of which `make test` runs those in `quick` alone, and `make test-all` all."""
    values = list(values)
    assert all(value in values for value in quick), quick
    as_tuples = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [value if value in quick else pytest.param(*as_tuples[value], marks=slow(reason)) for value in values]


def examples(number: int, *, quick: int | None = None) -> settings:
    """So many random examples of Hypothesis in `make test-all`, and `quick` of them (else a tenth) in `make test`."""
    thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=number if thorough else quick or max(3, number // 10), deadline=None)
