"""Agents as they are: a program that calls `solve(row, base_url, api_key)` in front of the endpoint."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cohort.records import Trajectory, TurnStats
from cohort.rollout.endpoint.http_server import Endpoint, listen
from cohort.rollout.endpoint.openai_requests import SAMPLING_FIELDS
from cohort.rollout.endpoint.session import Batcher, Session
from cohort.rollout.environments.child_process import ChildPool
from cohort.rollout.environments.handle import UserThread, call_function
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.trajectory import Outcome, Row, read_outcome

# solve(row, base_url, api_key) -> reward, mapping with metrics, or None; may be a coroutine function
Solve = Callable[[Row, str, str], Any]

# Much less than a generation, and enough for agents to send what follows an answer.
_QUIET_S = 0.01
_MAX_HELD_S = 0.1


class AgentProgram:
    """Plays rows with a user's agent, which calls the model through an OpenAI-compatible endpoint."""

    def __init__(
        self,
        solve: Solve,
        *,
        name: str,
        host: str = "127.0.0.1",
        batches_requests: bool = False,
        pool: ChildPool | None = None,
    ):
        """Create the program. The endpoint is started when the first trajectory is.

        Args:
            solve: the agent.
            name: name of the reward.
            host: address to listen on.
            batches_requests: hold requests for some milliseconds, for an engine that samples all waiting calls in one
                batch.
            pool: processes that have `solve` as their function "solve"; None to call it in this one.

        Raises:
            UserError: this machine does not have the address `host`.
        """
        listen(host).close()
        self.notify: Callable[[str], None] = lambda text: None  # shows a message to the user
        self._solve = solve
        self.name = name
        self._pool = pool
        self._host = host
        self._batcher = Batcher(quiet_s=_QUIET_S if batches_requests else 0.0, max_s=_MAX_HELD_S)
        self._endpoint: Endpoint | None = None
        self._warned: set[str] = set()  # fields of requests

    async def run(self, row: Row, model: RolloutModel, *, on_limit: Callable[[], None] = lambda: None) -> Outcome:
        """Play one row. The agent's key is valid until it returns.

        Args:
            row: row of the dataset.
            model: samples from the policy for this trajectory.
            on_limit: called before a request is refused because a limit has ended the trajectory.
        """
        self._endpoint = endpoint = self._endpoint or Endpoint(self._host)
        session = Session(model, warn=self._warn, batcher=self._batcher, on_limit=on_limit)
        outcome = Outcome()
        try:
            with endpoint.open(session) as key:
                agent = self._call(row, endpoint.base_url, key, on_return=session.end)
                returned = await session.until_failure(agent)
            outcome = read_outcome(returned, name=self.name)
        except EnvironmentFailure:
            raise
        except Exception:
            if model.ended is None:
                raise
            # the agent does not expect the limit, of which its client told it by an error of its own
        finally:
            model.keep(session.answered)
        stats = TurnStats(tool_calls=session.num_tool_calls, malformed_calls=session.num_malformed_calls)
        return replace(outcome, end=model.ended, stats=stats)

    def release(self, trajectory: Trajectory) -> None:
        """Do nothing: agents are not reused."""

    def close(self) -> None:
        """Stop the endpoint and the agents' processes. Agents that still run in threads get no answers."""
        if self._pool is not None:
            self._pool.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._pool is not None:
            self._pool.join()

    def counts(self) -> dict[str, int]:
        """Return the number of requests with a wrong key and of other refused ones since the last call."""
        return self._endpoint.counts() if self._endpoint is not None else {}

    async def _call(self, row: Row, base_url: str, api_key: str, *, on_return: Callable[[], None]) -> Any:
        """Call the agent: a coroutine function in this event loop, another function in a daemon thread.

        `on_return` is called there as soon as the agent returns: what it left behind may go on before this does.
        """
        if self._pool is not None:
            return await self._pool.call("solve", {}, positional=[dict(row), base_url, api_key], timeout_s=None)
        thread = UserThread(f"agent {self.name}")
        try:
            solve = partial(self._solve, dict(row), base_url, api_key)
            return await call_function(_notifying(solve, on_return), {}, thread=thread, timeout_s=None)
        finally:
            thread.close()

    def _warn(self, field: str) -> None:
        """Tell once that a field of requests has no effect."""
        if field in self._warned:
            return
        self._warned.add(field)
        reason = (
            "sampling is set by the run, because its loss assumes it" if field in SAMPLING_FIELDS else "not supported"
        )
        self.notify(f"rollout.agent: {self.name} sends {field!r}, which is ignored: {reason}")


def _notifying(function: Callable[[], Any], on_return: Callable[[], None]) -> Callable[[], Any]:
    """Return the function, with a call of `on_return` when it, or what it returns to be awaited, has returned."""

    async def wait_for(result: Awaitable[Any]) -> Any:
        try:
            return await result
        finally:
            on_return()

    def call() -> Any:
        result = None
        try:
            result = function()
        finally:
            if not inspect.isawaitable(result):
                on_return()
        return wait_for(result) if inspect.isawaitable(result) else result

    return call
