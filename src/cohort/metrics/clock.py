"""Wall time of a step, by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds per phase until they are taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `name`; a phase may be entered several times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/{phase}_s` for every phase since the last call, and `step_time`, their sum."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()} | {"step_time": sum(seconds.values())}
