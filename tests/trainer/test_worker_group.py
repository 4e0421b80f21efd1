"""Calls of workers: what they return and raise, and that mypy, which checks this file, sees their types."""

from typing import assert_type

import pytest

from cohort.errors import TrainingError
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup


class Counter:
    """A worker that adds up."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def describe(self, unit: str | None, prefix: str) -> str:
        return f"{prefix}{self.total}{unit or ''}"

    def reset(self) -> None:
        self.total = 0

    def fail(self) -> int:
        raise TrainingError("no room")


@pytest.fixture
def counters() -> WorkerGroup[Counter]:
    return WorkerGroup(Counter(), SINGLE_PROCESS)


def test_results_are_by_rank_and_typed(counters: WorkerGroup[Counter]) -> None:
    assert assert_type(counters.call(Counter.add, 3, times=2), list[int]) == [6]
    assert assert_type(counters.scatter(Counter.add, [4], times=1), list[int]) == [10]
    assert assert_type(counters.call_with_local(Counter.describe, " tokens", "all: "), list[str]) == ["all: 10 tokens"]
    assert assert_type(counters.call(Counter.reset), list[None]) == [None]
    assert assert_type(counters.local, Counter).total == 0


def test_an_error_of_a_worker_is_raised(counters: WorkerGroup[Counter]) -> None:
    with pytest.raises(TrainingError, match="no room"):
        counters.call(Counter.fail)


def mypy_refuses(counters: WorkerGroup[Counter]) -> None:
    """Never run. mypy reports a `type: ignore` that nothing needs, so each of these lines has to be an error."""
    counters.call(Counter.add, "3")  # type: ignore[arg-type]
    counters.call(Counter.add)  # type: ignore[call-arg]
    counters.call(Counter.add, 3, count=2)  # type: ignore[call-arg]
    counters.call(str.upper)  # type: ignore[arg-type]
    counters.scatter(Counter.add, ["3"])  # type: ignore[misc]
    counters.scatter(Counter.add, [3], times="2")  # type: ignore[arg-type]
    counters.call_with_local(Counter.describe, 3, "all: ")  # type: ignore[misc]
    names: list[str] = counters.call(Counter.add, 3)  # type: ignore[arg-type]
    del names
