"""The tool `python`: the model's code in the sandbox, fresh per call or with one process per trajectory."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cohort.chat import tool_schema
from cohort.config.environment import ToolSpec
from cohort.errors import UserError
from cohort.sandbox import Job, Sandbox, SharedSandbox
from cohort.sandbox.session import Session, SessionEnded


class PythonStopped(Exception):  # noqa: N818
    """The code was stopped, or did not start."""


class PythonTool:
    """Runs every call in a fresh process. See `EnvironmentHandle`."""

    instance = None
    is_alive = True

    def __init__(self, sandbox: Sandbox, *, pool: ThreadPoolExecutor | None = None):
        """Create a handle; `pool` bounds how many calls run at once."""
        self._sandbox = sandbox
        self._pool = pool or ThreadPoolExecutor(sandbox.max_concurrent, thread_name_prefix="tool python")

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> str:
        """Run code and return its output.

        Raises:
            PythonStopped: it exceeded a limit, ended its process, or the sandbox does not start.
        """
        loop = asyncio.get_running_loop()
        wall_s = min(timeout_s, self._sandbox.limits.wall_s)
        return await loop.run_in_executor(self._pool, self._run, str(arguments["code"]), wall_s)

    def for_trajectory(self) -> "PythonTool":
        """Return the handle for one trajectory."""
        return self

    async def refresh(self, *, timeout_s: float) -> None:
        """Do nothing: there is no instance."""

    def close(self) -> None:
        """Start no further calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self, timeout_s: float) -> None:
        """Do nothing: a call ends by its limits."""

    def _run(self, code: str, wall_s: float) -> str:
        request = {"kind": "python", "code": code, "max_output": self._sandbox.limits.max_output_bytes}
        limits = replace(self._sandbox.limits, wall_s=wall_s)
        outcome = self._sandbox.run(Job(request=request, limits=limits))
        if not outcome.started:
            raise PythonStopped(f"the sandbox did not start: {outcome.errors[:200]}")
        if not outcome.records:
            raise PythonStopped(_stopped({"exited": "the process ended"}.get(outcome.ending, outcome.ending), wall_s))
        return _text(outcome.records[0])


class StatefulPythonTool(PythonTool):
    """Runs the calls of a trajectory in one process, which keeps their variables."""

    def __init__(self, sandbox: Sandbox, *, pool: ThreadPoolExecutor | None = None):
        """See `PythonTool`."""
        super().__init__(sandbox, pool=pool)
        self._session = Session(sandbox)
        self._lock = asyncio.Lock()
        self._is_over = False  # no process may start after the trajectory

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> str:
        """See `PythonTool.call`. Calls of one reply run in their order."""
        async with self._lock:
            return await super().call(name, arguments, timeout_s=timeout_s)

    def for_trajectory(self) -> "StatefulPythonTool":
        """Return a handle with a process of its own."""
        return StatefulPythonTool(self._sandbox, pool=self._pool)

    def end_trajectory(self) -> None:
        """End the process; return at once."""
        self._is_over = True
        self._session.close()

    def _run(self, code: str, wall_s: float) -> str:
        try:
            return _text(self._session.call(code, wall_s=wall_s))
        except SessionEnded as error:
            self._session.close()
            if not self._is_over:
                self._session = Session(self._sandbox)
            raise PythonStopped(f"{_stopped(str(error), wall_s)}; all variables are lost") from error


def load_python_tool(spec: ToolSpec, sandbox: SharedSandbox, *, field: str) -> tuple[dict[str, Any], PythonTool]:
    """Open the sandbox, and return the tool's schema and handle.

    Raises:
        UserError: no sandbox works here, or it holds no state.
    """
    state = bool(spec.args.get("state", False))
    opened = sandbox.open()
    if state and not opened.backend.holds_sessions:
        raise UserError(
            f"{field}: {{use: python, args: {{state: true}}}} needs a process per trajectory, which sandbox.backend: "
            f"{opened.backend.name} does not have; remove state, or use sandlock, bubblewrap or container"
        )
    return tool_schema(_with_state if state else python), (StatefulPythonTool if state else PythonTool)(opened)


def python(code: str) -> str:  # type: ignore[empty-body]  # its signature is what the model sees
    """Run Python code in a fresh process and return what it prints, and the value of its last expression.

    Args:
        code: Python code
    """


def _with_state(code: str) -> str:  # type: ignore[empty-body]
    """Run Python code and return what it prints, and the value of its last expression. Variables are kept.

    Args:
        code: Python code
    """


_with_state.__name__ = python.__name__


def _text(record: Mapping[str, Any]) -> str:
    output, missing = str(record.get("output", "")), record.get("missing")
    if isinstance(missing, int) and missing > 0:
        output += f"\n[... {missing:,} more bytes were cut]"
    return output


def _stopped(why: str, wall_s: float) -> str:
    if why in ("wall time", "timed out"):
        return f"the code did not finish within {wall_s:g} s"
    return f"the code was stopped: {why}"
