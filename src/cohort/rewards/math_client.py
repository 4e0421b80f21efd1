"""Client of the math worker: one child process with a deadline per answer, replaced when it dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal

from cohort.errors import UserError

Verdict = Literal[
    "correct", "wrong", "answer_unparsable", "gold_unparsable", "timeout", "crashed", "out_of_time"
]  # fmt: skip
Grader = Literal["math", "trl", "open_r1", "open_r1_latex"]  # see `math_worker.GRADERS`
# -P: the working directory must not hide a module of the standard library.
WORKER_COMMAND = (sys.executable, "-P", "-m", "cohort.rewards.math_worker")


class MathWorker:
    """Grades answers in a child process, which is started for the first answer and ends with this object.

    A child that dies (such as killed from outside) is replaced and the answer graded again, once. A child that misses
    the deadline is killed. It exits when its standard input closes, so it does not outlive a killed parent.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND, *, start_timeout_s: float = 120.0) -> None:
        """Create a client; the child starts with the first answer.

        Args:
            command: command line of a program with the protocol of `math_worker`.
            start_timeout_s: deadline for the child's imports.
        """
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._children: list[_Child] = []  # none or one; a list, because the finalizer must not hold `self`
        self._num_requests = 0
        weakref.finalize(self, _end_all, self._children)

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return self._children[0].process.pid if self._children else None

    def grade(self, gold: str, text: str, *, deadline_s: float, grader: Grader = "math") -> Verdict:
        """Grade the answer in `text`. Returns "timeout" past the deadline, and "crashed" if two children died of it.

        Raises:
            UserError: the child does not start.
        """
        with self._lock:
            for _ in range(2):
                child = self._running_child()
                self._num_requests += 1
                request = {"id": self._num_requests, "gold": gold, "text": text, "deadline_s": deadline_s}
                request["grader"] = grader
                reply, late = child.exchange(request, deadline_s)
                if reply is not None and not late:
                    verdict: Verdict = reply["verdict"]
                    return verdict
                _end_all(self._children)
                if late:
                    return "timeout"
        return "crashed"

    def close(self) -> None:
        """Stop the child, if there is one."""
        with self._lock:
            _end_all(self._children)

    def _running_child(self) -> "_Child":
        if self._children and self._children[0].process.poll() is not None:
            _end_all(self._children)
        if not self._children:
            child = _Child(self._command)
            self._children.append(child)
            reply, late = child.exchange(None, self._start_timeout_s)
            if reply is None:
                _end_all(self._children)
                why = f"not ready within {self._start_timeout_s:g} s" if late else "it exited immediately"
                raise UserError(
                    f"the worker process of the math reward failed to start: {why}. Command: "
                    f"{' '.join(self._command)}. End of its stderr: {child.stderr_tail()}"
                )
        return self._children[0]


class _Child:
    """A child process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the parent; and the whole group can be killed
        )

    def exchange(self, request: dict[str, Any] | None, deadline_s: float) -> tuple[dict[str, Any] | None, bool]:
        """Send a request (None: only wait for the ready message) and wait for the reply.

        Returns:
            The reply, or None if there is no valid one; and whether the deadline passed, which kills the child.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._killed_after(deadline_s) as passed:
            try:
                if request is not None:
                    self.process.stdin.write(json.dumps(request).encode() + b"\n")
                    self.process.stdin.flush()
                reply = json.loads(self.process.stdout.readline() or b"null")
            except (OSError, ValueError):  # a broken pipe, or a line cut short
                reply = None
        expected = None if request is None else request["id"]
        is_right = isinstance(reply, dict) and reply.get("id", -1) == expected
        return (reply if is_right else None), passed.is_set()

    @contextlib.contextmanager
    def _killed_after(self, deadline_s: float) -> Iterator[threading.Event]:
        """Kill the child after a deadline: closed pipes then end any read or write of the parent."""
        passed = threading.Event()

        def kill() -> None:
            passed.set()
            self.kill()

        timer = threading.Timer(deadline_s, kill)
        timer.daemon = True
        timer.start()
        try:
            yield passed
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill the child and its process group."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the child and close its pipes."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten data
                    pipe.close()

    def stderr_tail(self) -> str:
        """Return the end of its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-600:].strip() or "(none)"


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()
