"""Replies of judges on disk, by a key of their content."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def content_key(content: Any) -> str:
    """Return a key of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """Replies in a JSON-lines file, one line for each. Several processes may use the same file.

    A line is appended by one write, so a killed process leaves at most a last line that does not end, which is skipped.
    Only keys and positions are in memory.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create a cache.

        Args:
            path: the file; None: in memory only.
        """
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}  # key -> offset and bytes of its line
        self._in_memory: dict[str, str] = {}
        self._read_to = 0
        self._file = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._read_lines()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def get(self, key: str) -> str | None:
        """Return the reply of a key, or None."""
        if key not in self._places:
            return self._in_memory.get(key)
        offset, size = self._places[key]
        return str(json.loads(os.pread(self._file, size, offset))["reply"])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply. If the disk fails, it is kept in memory."""
        if self._file < 0:
            self._in_memory[key] = reply
            return
        line = json.dumps({"key": key, "reply": reply}).encode() + b"\n"
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":  # a process was killed while it wrote
            line = b"\n" + line
        try:
            os.write(self._file, line)
        except OSError:
            self._in_memory[key] = reply
            return
        self._read_lines()  # those of other processes too

    def _read_lines(self) -> None:
        """Read the lines that were added since the last time."""
        with open(self._file, "rb", closefd=False) as lines:
            lines.seek(self._read_to)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                with suppress(ValueError, LookupError, TypeError):  # half a line
                    self._places[json.loads(line)["key"]] = (self._read_to, len(line))
                self._read_to += len(line)
