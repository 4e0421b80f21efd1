"""A process in the sandbox that runs one piece of code after another and keeps its variables."""

import json
import marshal
import os
import queue
import selectors
import threading
import time
from collections.abc import Mapping
from typing import Any

from cohort.sandbox.pool import FORMAT, Sandbox
from cohort.sandbox.process import USAGE_CHECK_S, Child, Ending, Limits, ProcessResult


class SessionEnded(Exception):  # noqa: N818
    """The process of a session has ended: its variables are lost."""


class PythonSession:
    """One confined process, which starts with the first call and is killed by `close`.

    Calls come one after another. After `SessionEnded`, the session is of no more use.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        """Create a session of a sandbox whose backend `holds_sessions`."""
        self._sandbox = sandbox
        self._requests: queue.SimpleQueue[tuple[bytes, float] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ended = False

    def call(self, code: str, *, wall_s: float) -> Mapping[str, Any]:
        """Run code and return the guest's record of it, which is not to be trusted.

        Raises:
            SessionEnded: the process exceeded a limit, ended, or did not start.
        """
        if self.ended:
            raise SessionEnded("the session is closed")
        if self._thread is None:
            job = {"kind": "python", "code": code, "max_output": self._sandbox.limits.max_output_bytes}
            request = marshal.dumps(job, FORMAT).hex()
            self._thread = threading.Thread(target=self._run, name="sandbox session", daemon=True)
            self._thread.start()
        else:
            request = code.encode(errors="replace").hex()
        self._requests.put((request.encode() + b"\n", wall_s))
        answer = self._answers.get()
        if isinstance(answer, str):
            self.ended = True
            raise SessionEnded(answer)
        return answer

    def close(self) -> None:
        """Kill the process and all that it started; return at once."""
        self.ended = True
        self._requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until it is gone, but not longer than `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def converse(self, child: Child, deadline_s: float) -> Ending:
        """Exchange requests and answers with the process until the session is closed. See `process.Conversation`."""
        buffer = bytearray()
        calls = 0
        while (request := self._requests.get()) is not None:
            text, wall_s = request
            if calls:
                child.resume()
            exchange = _Exchange(child, self._sandbox.limits, is_ready=calls > 0)
            lines = 1 if calls else 2  # the first says that the guest is ready
            ending = exchange.run(self, text, buffer, lines, time.monotonic() + min(wall_s, deadline_s))
            if ending is not None:
                return ending
            *_, answer = (_read_line(buffer) for _ in range(lines))
            # lines that the code has written to the channel must not become answers of later calls
            if buffer or not isinstance(answer, dict) or answer.get("call") != calls:
                return "exited"
            child.pause()  # nothing runs, or grows, while the model writes
            calls += 1
            self._answers.put(answer)
        return "exited"

    def _run(self) -> None:
        problem = "the process ended"
        try:
            result: ProcessResult = self._sandbox.start(self)
            problem = {"exited": problem, "wall time": "timed out"}.get(result.ending, f"exceeded its {result.ending}")
            if not result.output and result.errors:
                problem += f" ({result.errors.decode(errors='replace').strip()[-200:]})"
        except OSError as error:
            problem = f"the sandbox did not start: {error}"
        finally:
            self._answers.put(problem)


class _Exchange:
    """Writes one request and reads lines of an answer."""

    def __init__(self, child: Child, limits: Limits, *, is_ready: bool) -> None:
        self._child, self._limits, self._is_ready = child, limits, is_ready

    def run(
        self, session: PythonSession, text: bytes, buffer: bytearray, num_lines: int, deadline: float
    ) -> Ending | None:
        """Return None if the lines are in `buffer`, else why not."""
        os.set_blocking(self._child.stdin, False)
        with selectors.DefaultSelector() as selector:
            for fd in (self._child.stdout, self._child.stderr, self._child.ended):
                selector.register(fd, selectors.EVENT_READ)
            selector.register(self._child.stdin, selectors.EVENT_WRITE)
            next_check = 0.0
            while buffer.count(b"\n") < num_lines:
                ready = {key.fd for key, _ in selector.select(0.1)}
                if self._child.stdin in ready:
                    try:
                        text = text[os.write(self._child.stdin, text[:65536]) :]
                    except BrokenPipeError:
                        return "exited"
                    if not text:
                        selector.unregister(self._child.stdin)
                for fd in ready & {self._child.stdout, self._child.stderr}:
                    data = os.read(fd, 65536)
                    if fd == self._child.stdout:
                        buffer += data
                    if not data:
                        selector.unregister(fd)
                if self._child.ended in ready and self._child.stdout not in ready:
                    return "exited"
                if len(buffer) > self._limits.channel_bytes:
                    return "output limit"
                if session.ended:  # closed during a call
                    return "exited"
                now = time.monotonic()
                if now >= deadline:
                    return "wall time"
                if now >= next_check:
                    next_check = now + USAGE_CHECK_S
                    is_ready = self._is_ready or bool(buffer)
                    if is_ready and (exceeded := self._child.usage(self._limits).exceeded(self._limits)):
                        return exceeded
        return None


def _read_line(buffer: bytearray) -> Any:
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
