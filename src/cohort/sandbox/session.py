"""A process in the sandbox that runs one piece of code after another and keeps its variables."""

import json
import marshal
import queue
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from cohort.sandbox.pool import FORMAT, Sandbox
from cohort.sandbox.process import Ending, Pump


class SessionEnded(Exception):  # noqa: N818
    """The process of a session has ended: its variables are lost."""


class PythonSession:
    """One confined process, which starts with the first call and is killed by `close`.

    Calls come one after another. After `SessionEnded`, the session is of no more use. A thread of its own talks to the
    process: bubblewrap ends with the thread that has started it.
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

    def _converse(self, pump: Pump) -> Ending:
        """Exchange requests and answers with the process until the session is closed."""
        calls = 0
        while (request := self._requests.get()) is not None:
            text, wall_s = request
            if calls:
                pump.child.resume()
            lines = 1 if calls else 2  # the first says that the guest is ready
            deadline = time.monotonic() + min(wall_s, self._sandbox.limits.wall_s)
            ending = pump.run(text, deadline, until=partial(self._is_over, pump.output, lines))
            if ending is not None or self.ended:
                return ending or "exited"
            *_, answer = (_read_line(pump.output) for _ in range(lines))
            # lines that the code has written to the channel must not become answers of later calls
            if pump.output or not isinstance(answer, dict) or answer.get("call") != calls:
                return "exited"
            pump.child.pause()  # nothing runs, or grows, while the model writes
            calls += 1
            self._answers.put(answer)
        return "exited"

    def _is_over(self, output: bytearray, num_lines: int) -> bool:
        """Whether a call is answered, or the session was closed."""
        return self.ended or output.count(b"\n") >= num_lines

    def _run(self) -> None:
        problem = "the process ended"
        try:
            result = self._sandbox.start(self._converse)
            problem = {"exited": problem, "wall time": "timed out"}.get(result.ending, f"exceeded its {result.ending}")
            if result.errors:  # of the sandbox: those of code are in its answers
                problem += f" ({result.errors.decode(errors='replace').strip()[-200:]})"
        except OSError as error:
            problem = f"the sandbox did not start: {error}"
        finally:
            self._answers.put(problem)


def _read_line(buffer: bytearray) -> Any:
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
