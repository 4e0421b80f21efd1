"""Record in a file which reward function is running, so that a crash can be attributed at the next start.

A function that segfaults, aborts or calls `os._exit` ends the run without an error message.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cohort.stopping import on_kill


class RewardCrashMarker:
    """The marker file. It exists while a function runs, and remains if the process dies inside it."""

    def __init__(self, file: Path):
        """Create a marker; `file` is in the run folder."""
        self._file = file

    def last_crash(self) -> str | None:
        """Describe the function in which the last process died, and delete the file; None if there is no file."""
        try:
            what = self._file.read_text(encoding="utf-8", errors="replace")
            self._file.unlink()
        except FileNotFoundError:
            return None
        return f"the last process died inside {what}; with rewards[i].isolate: true, only a process of its own dies"

    @contextmanager
    def mark(self, what: str) -> Iterator[None]:
        """Mark a function as running; `what` names it and the phase of the run."""
        with suppress(OSError):  # a full disk is reported by writes that matter
            self._file.write_text(what, encoding="utf-8")
        try:
            with on_kill(self._forget):
                yield
        finally:
            self._forget()

    def _forget(self) -> None:
        with suppress(OSError):
            self._file.unlink()
