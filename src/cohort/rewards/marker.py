"""Where a reward function is, in a file that outlives the process.

A function that segfaults, aborts or calls `os._exit` ends the run without a word. The next start says where that was.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from cohort.stopping import cleaning_up

T = TypeVar("T")
_HEAD = struct.Struct("<qq")  # how many completions it has looked at, or which was the last; of how many
_BYTES = 4096


class RewardMarker:
    """The file. It is there while a function runs, and stays when the process ends inside of it."""

    def __init__(self, file: Path):
        """`file` is in the run's folder."""
        self._file = file

    def left_behind(self) -> str | None:
        """In which function the last process ended, in words, once; None where it ended elsewhere."""
        try:
            data = self._file.read_bytes()
            self._file.unlink()
            number, total = _HEAD.unpack_from(data)
            what = data[_HEAD.size :].rstrip(b"\0").decode("utf-8", "replace")
        except (FileNotFoundError, struct.error):
            return None
        looked = f"; the last completion that it looked at was number {number} of {total}" if number else ""
        return f"the last process ended inside {what}{looked}"

    @contextmanager
    def inside(self, what: str, num_completions: int) -> Iterator[Callable[[list[T]], list[T]]]:
        """Inside, a function runs. What this gives makes a list whose readers leave a trace of how far they are.

        Args:
            what: the function, and when.
            num_completions: that it gets.
        """
        text = what.encode()[: _BYTES - _HEAD.size]
        with ExitStack() as at_the_end:
            memory = None
            with suppress(OSError):  # a full disk is told by what has to be written
                self._file.write_bytes((_HEAD.pack(0, num_completions) + text).ljust(_BYTES, b"\0"))
                at_the_end.callback(self._forget)
                at_the_end.enter_context(cleaning_up(self._forget))
                file = at_the_end.enter_context(self._file.open("r+b"))
                memory = at_the_end.enter_context(mmap.mmap(file.fileno(), _BYTES))
            yield lambda items: items if memory is None else _Watched(items, memory)

    def _forget(self) -> None:
        with suppress(OSError):
            self._file.unlink()


class _Watched(list[Any]):
    """A list that notes in memory, which a file is, the number of the entry that was read last."""

    def __init__(self, items: list[Any], memory: mmap.mmap):
        super().__init__(items)
        self._memory = memory

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__(), start=1):
            self._note(number)
            yield item

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, SupportsIndex):
            number = at.__index__()
            self._note(number + 1 if number >= 0 else len(self) + number + 1)
        return super().__getitem__(at)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)  # for other processes, and copies

    def _note(self, number: int) -> None:
        if not self._memory.closed:  # the function's thread may be left behind
            self._memory[:8] = struct.pack("<q", number)
