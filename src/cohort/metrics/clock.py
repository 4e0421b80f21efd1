"""Wall-clock time of a step by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Accumulates seconds per phase."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        """`on_phase` is called with the name of a phase as it begins."""
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase `name`; a phase may be entered repeatedly."""
        self._on_phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return and reset `time/{phase}_s` per phase and their sum `step_time`."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()} | {"step_time": sum(seconds.values())}
