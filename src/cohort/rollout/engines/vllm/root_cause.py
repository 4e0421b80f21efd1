"""Extract the root cause of a crash from a vLLM server's log."""

import re

_MAX_LINES = 12  # maximum lines of an exception
_TRACEBACK = "Traceback (most recent call last):"
# Separators of chained tracebacks. The original exception is more informative before _FROM, the later one after _WHILE.
_FROM = "The above exception was the direct cause of the following exception:"
_WHILE = "During handling of the above exception, another exception occurred:"
# "(EngineCore pid=2345) ERROR 11-22 10:00:00 [core.py:1000] ": process and log record, both optional. uvicorn's records
# begin with "ERROR:    ".
_PREFIX = re.compile(
    r"(?P<process>(?:\([^()]*\bpid=\d+\) ?)*)(?P<record>[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\] ?|[A-Z]+: {2,})?"
)
# Exceptions that only report that another process failed, or that this one was killed.
_REPORT = re.compile(
    r"EngineDeadError|EngineCore encountered an issue|Engine core initialization failed"
    r"|See (the )?(root cause|stack trace)|WorkerProc initialization failed|died unexpectedly|failed to start|ZMQError"
    r"|(Cancelled|BrokenBarrier|BrokenPipe|EOF)Error\b|^(SystemExit|KeyboardInterrupt)\b"
)


def root_cause(log: str) -> str | None:
    """Return the exception that crashed a server, without log prefixes.

    When a process fails, processes that depend on it log tracebacks too, so the last lines of a log say little. The
    cause is the last traceback that does not merely report another one. In a chain it is the exception that others were
    raised from, or the last one raised while handling another.

    Args:
        log: the server's log since its last start.

    Returns:
        the exception with its message, at most 12 lines; None if there is no informative traceback.
    """
    causes = [text for chain in _chains(log) if (text := _root_exception(chain))]
    return causes[-1] if causes else None


def _root_exception(chain: list[list[str]]) -> str | None:
    """Return the last exception of a chain that does not merely report another one."""
    texts = ["\n".join(text) for text in chain]
    return next((text for text in reversed(texts) if not _REPORT.search(text)), None)


def _chains(log: str) -> list[list[list[str]]]:
    """Return the exceptions (as lines) of each chain, in log order."""
    found: list[list[list[str]]] = []
    readers: dict[str, _Reader] = {}  # one per process, since their lines are interleaved
    for line in log.splitlines():
        prefix = _PREFIX.match(line)
        assert prefix is not None  # both of its parts are optional
        reader = readers.setdefault(prefix["process"] or "", _Reader())
        reader.read(prefix["record"] or "", line[prefix.end() :], found)
    return found


class _Reader:
    """Parses the log lines of one process."""

    def __init__(self) -> None:
        self._in_traceback = False
        self._record = ""  # prefix of the traceback; other records may be interleaved
        self._text: list[str] | None = None  # lines of an exception whose message may continue
        self._chain: list[list[str]] | None = None  # chain of the next traceback
        self._ignore = False  # the next traceback is not a root cause

    def read(self, record: str, line: str, found: list[list[list[str]]]) -> None:
        """Parse the next line, and add exceptions to `found`."""
        text = line.strip()
        if text == _TRACEBACK:
            self._in_traceback, self._record, self._text = True, record, None
        elif self._in_traceback:
            if text and not line[0].isspace() and record == self._record:
                self._end(line, found)
        elif text == _FROM or line.startswith("Exception ignored in"):
            self._ignore, self._text = True, None
        elif text == _WHILE:
            self._chain, self._text = found[-1] if found else None, None
        elif self._text is not None and text and self._continues(record, line):
            if len(self._text) < _MAX_LINES:
                self._text.append(line)
        elif text:
            self._text, self._chain, self._ignore = None, None, False

    def _end(self, line: str, found: list[list[list[str]]]) -> None:
        """End a traceback at the first line of its exception."""
        self._in_traceback, self._text = False, [line]
        if self._chain is not None:
            self._chain.append(self._text)
        elif not self._ignore:
            found.append([self._text])
        self._chain, self._ignore = None, False

    def _continues(self, record: str, line: str) -> bool:
        """Whether a line belongs to the message of the exception above it."""
        return record == self._record and (bool(record) or line[0].isspace())
