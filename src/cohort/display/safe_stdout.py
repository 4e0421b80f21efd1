"""Standard output that survives the loss of its reader."""

import os
import sys
from contextlib import suppress
from typing import Any


class SafeStdout:
    """Standard output that never raises: `| head`, a full disk or a closed terminal must not end a run.

    After the first error, all further output of the process is discarded.
    """

    def write(self, text: str) -> int:
        """Write, or discard after an error."""
        try:
            return sys.stdout.write(text)
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None, closed from the start
            _discard_stdout()
            return len(text)

    def flush(self) -> None:
        """Flush, or discard after an error."""
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            _discard_stdout()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, since the interpreter flushes it at exit and would fail again."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
