"""Find in a vLLM server's log the exception that ended it."""

import re

_MAX_LINES = 12  # of an exception's text
_TRACEBACK = "Traceback (most recent call last):"
# Between the tracebacks of a chain: what is raised from another tells less than it, what is raised while another is
# handled tells more.
_FROM = "The above exception was the direct cause of the following exception:"
_WHILE = "During handling of the above exception, another exception occurred:"
# "(EngineCore pid=2345) ERROR 11-22 10:00:00 [core.py:1000] ": the process, then the record; either may be missing.
# uvicorn's records begin with "ERROR:    ".
_PREFIX = re.compile(
    r"(?P<process>(?:\([^()]*\bpid=\d+\) ?)*)(?P<record>[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\] ?|[A-Z]+: {2,})?"
)
# Exceptions that only report that another process has failed, or that somebody has ended this one.
_REPORT = re.compile(
    r"EngineDeadError|EngineCore encountered an issue|Engine core initialization failed"
    r"|See (the )?(root cause|stack trace)|WorkerProc initialization failed|died unexpectedly|failed to start|ZMQError"
    r"|(Cancelled|BrokenBarrier|BrokenPipe|EOF)Error\b|^(SystemExit|KeyboardInterrupt)\b"
)


def root_cause(log: str) -> str | None:
    """Return the exception that a server ended with, without the prefixes of log lines.

    A process that fails logs its traceback; processes that depend on it then log tracebacks of their own, so that the
    last lines of a log say little. The cause is the last traceback that does not only report another one; of a chain,
    the exception that others were raised from, or the last one that was raised while another was handled.

    Args:
        log: what the server has written since it was started.

    Returns:
        the exception with its message, at most 12 lines, or None where no traceback tells more than that something
        else has failed.
    """
    causes = [text for chain in _chains(log) if (text := _telling(chain))]
    return causes[-1] if causes else None


def _telling(chain: list[list[str]]) -> str | None:
    """The last exception of a chain that does not only report another one."""
    texts = ["\n".join(text) for text in chain]
    return next((text for text in reversed(texts) if not _REPORT.search(text)), None)


def _chains(log: str) -> list[list[list[str]]]:
    """The exceptions of each chain, as lines, in the order of the log."""
    found: list[list[list[str]]] = []
    readers: dict[str, _Reader] = {}  # processes write at the same time, so that each one's lines are read on their own
    for line in log.splitlines():
        prefix = _PREFIX.match(line)
        assert prefix is not None  # both of its parts are optional
        reader = readers.setdefault(prefix["process"] or "", _Reader())
        reader.read(prefix["record"] or "", line[prefix.end() :], found)
    return found


class _Reader:
    """Reads the lines of one process."""

    def __init__(self) -> None:
        self._in_traceback = False
        self._record = ""  # of the traceback: another one's lines may come in between
        self._text: list[str] | None = None  # of an exception that may go on
        self._chain: list[list[str]] | None = None  # that the next traceback belongs to
        self._ignore = False  # the next traceback tells of no cause

    def read(self, record: str, line: str, found: list[list[list[str]]]) -> None:
        """Take the next line, and add what it begins or continues to `found`."""
        said = line.strip()
        if said == _TRACEBACK:
            self._in_traceback, self._record, self._text = True, record, None
        elif self._in_traceback:
            if said and not line[0].isspace() and record == self._record:
                self._end(line, found)
        elif said == _FROM or line.startswith("Exception ignored in"):
            self._ignore, self._text = True, None
        elif said == _WHILE:
            self._chain, self._text = found[-1] if found else None, None
        elif self._text is not None and said and self._continues(record, line):
            if len(self._text) < _MAX_LINES:
                self._text.append(line)
        elif said:
            self._text, self._chain, self._ignore = None, None, False

    def _end(self, line: str, found: list[list[list[str]]]) -> None:
        """A traceback ends with the first line of its exception."""
        self._in_traceback, self._text = False, [line]
        if self._chain is not None:
            self._chain.append(self._text)
        elif not self._ignore:
            found.append([self._text])
        self._chain, self._ignore = None, False

    def _continues(self, record: str, line: str) -> bool:
        """Whether a line belongs to the message of the exception above it."""
        return record == self._record and (bool(record) or line[0].isspace())
