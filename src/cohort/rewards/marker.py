"""Record in a file which reward function is running, so that a crash can be attributed at the next start.

A function that segfaults, aborts or calls `os._exit` ends the run without an error message.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from cohort.stopping import on_kill

T = TypeVar("T")
_HEAD = struct.Struct("<qq")  # number of the last completion read, total
_BYTES = 4096


class RewardCrashMarker:
    """The marker file. It exists while a function runs, and remains if the process dies inside it."""

    def __init__(self, file: Path):
        """Create a marker; `file` is in the run folder."""
        self._file = file

    def last_crash(self) -> str | None:
        """Describe the function in which the last process died, and delete the file; None if there is no file."""
        try:
            data = self._file.read_bytes()
            self._file.unlink()
            number, total = _HEAD.unpack_from(data)
            what = data[_HEAD.size :].rstrip(b"\0").decode("utf-8", "replace")
        except (FileNotFoundError, struct.error):
            return None
        progress = f"; the last completion it read was number {number} of {total}" if number else ""
        return f"the last process died inside {what}{progress}"

    @contextmanager
    def mark(self, what: str, num_completions: int) -> Iterator[Callable[[list[T]], list[T]]]:
        """Mark a function as running. Yields a function that wraps a list to record which entry was last read.

        Args:
            what: the function and the phase of the run.
            num_completions: completions passed to it.
        """
        text = what.encode()[: _BYTES - _HEAD.size]
        with ExitStack() as at_the_end:
            memory = None
            with suppress(OSError):  # a full disk is reported by writes that matter
                self._file.write_bytes((_HEAD.pack(0, num_completions) + text).ljust(_BYTES, b"\0"))
                at_the_end.callback(self._forget)
                at_the_end.enter_context(on_kill(self._forget))
                file = at_the_end.enter_context(self._file.open("r+b"))
                memory = at_the_end.enter_context(mmap.mmap(file.fileno(), _BYTES))
            yield lambda items: items if memory is None else _Watched(items, memory)

    def _forget(self) -> None:
        with suppress(OSError):
            self._file.unlink()


class _Watched(list[Any]):
    """A list that records in a memory-mapped file the number of the entry that was read last."""

    def __init__(self, items: list[Any], memory: mmap.mmap):
        super().__init__(items)
        self._memory = memory

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__(), start=1):
            self._record(number)
            yield item

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, SupportsIndex):
            number = at.__index__()
            self._record(number + 1 if number >= 0 else len(self) + number + 1)
        return super().__getitem__(at)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)  # for pickle and copy

    def _record(self, number: int) -> None:
        if not self._memory.closed:  # an abandoned thread may still be reading
            self._memory[:8] = struct.pack("<q", number)
