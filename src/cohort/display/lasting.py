"""The console, which a run outlives."""

import os
import sys
from contextlib import suppress
from typing import Any


class LastingStream:
    """Standard output as long as it takes what is written: `| head`, a full disk or a closed terminal end no run.

    After the first failure, what this process writes there is dropped.
    """

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return sys.stdout.write(text)
        except (OSError, ValueError, AttributeError):  # ValueError: it was closed; AttributeError: from the beginning
            _let_go()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            _let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def _let_go() -> None:
    """The interpreter flushes at its end, too, and would fail once more."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
