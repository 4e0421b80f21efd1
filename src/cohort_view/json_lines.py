"""Growing files of JSON lines, read once, then only what is new."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from pydantic_core import from_json

_BLOCK_BYTES = 8 << 20
_CHECK_BYTES = 256  # before the position, compared to notice a file that was rewritten in place

Change = Literal["unchanged", "appended", "rewritten"]


class JsonLines:
    """Position in a file of JSON lines that another process appends to, or replaces.

    An incomplete last line is left for later. A file that is gone, became shorter, was replaced, or whose last bytes
    before the position differ counts as rewritten, and is read again from its start.
    """

    def __init__(self, path: Path):
        self.path = path
        self.exists = False
        self._offset = 0
        self._before = b""  # the bytes before the offset
        self._found: tuple[int, ...] | None = None  # device, inode, size and times of change at the last check

    def check(self) -> Change:
        """Compare the file with what was read of it.

        Raises:
            OSError: the file cannot be opened.
        """
        try:
            stat = os.stat(self.path)
            # the time of change of the file's status, too: it may have become readable
            found = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            is_file = S_ISREG(stat.st_mode)
        except (FileNotFoundError, NotADirectoryError):
            found, is_file = None, True
        if found == self._found:
            return "unchanged"
        before, self._found, self.exists = self._found, found, found is not None
        if not is_file:
            raise OSError(errno.EINVAL, "not a regular file")
        if before is None or (found is not None and before[:2] == found[:2] and self._continues()):
            return "appended"
        self._offset, self._before = 0, b""
        return "rewritten"

    def blocks(self) -> Iterator[bytes]:
        """Yield the complete lines after the position in blocks of at most 8 MB. A longer line is cut in pieces.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_BLOCK_BYTES):
                end = chunk.rfind(b"\n") + 1
                if end == 0 and len(chunk) < _BLOCK_BYTES:
                    return
                block = chunk[: end or len(chunk)]
                self._offset += len(block)
                self._before = (self._before + block[-_CHECK_BYTES:])[-_CHECK_BYTES:]
                file.seek(self._offset)
                yield block

    def _continues(self) -> bool:
        """Whether the bytes before the position are still those that were read."""
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._before))
            return file.read(len(self._before)) == self._before


def parse_lines(block: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line; None for a line that is not a JSON object."""
    for line in block.splitlines():
        row = None
        with suppress(ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
            try:
                row = from_json(line, cache_strings="keys")  # takes a third of the time
            except ValueError:
                row = json.loads(line)  # allows half of a surrogate pair
        yield row if isinstance(row, dict) else None
