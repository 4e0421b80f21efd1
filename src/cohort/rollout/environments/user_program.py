"""Programs of users: an object or function with `async def run(row, model) -> float | dict | None`."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from cohort.processes.messages import CLOSE_TIMEOUT_S
from cohort.records import Trajectory
from cohort.rollout.environments.child_process import ChildPool
from cohort.rollout.environments.environment_class import reset_seed
from cohort.rollout.environments.handle import InstanceHandle, UserThread, with_deadline
from cohort.rollout.environments.model import RolloutModel
from cohort.rollout.environments.trajectory import Outcome, Row, read_outcome

Run = Callable[[Row, RolloutModel], Awaitable[Any]]


class IsolatedProgram:
    """Plays rows with a user's `run` in child processes. Each has an instance, and plays one row at a time."""

    def __init__(self, pool: ChildPool, *, name: str):
        """Create the program.

        Args:
            pool: processes that host `run`.
            name: name of the reward.
        """
        self._pool = pool
        self._name = name

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        """Play one row."""
        returned = await self._pool.call(
            "run", {}, positional=[dict(row)], timeout_s=None, seed=reset_seed(model.key), model=model
        )
        return read_outcome(returned, name=self._name)

    def release(self, trajectory: Trajectory) -> None:
        """Do nothing: a process is free as soon as `run` has returned."""

    def close(self) -> None:
        """Close all instances, and end their processes."""
        self._pool.close()
        self._pool.join()


class UserProgram:
    """Plays rows with a user's `run`. All trajectories of the run share one instance."""

    def __init__(self, run: Run, *, name: str, instance: Any = None):
        """Create the program.

        Args:
            run: coroutine function.
            name: name of the reward.
            instance: object with the method `run` and, optionally, `release(trajectory)` and `close()`.
        """
        self._run = run
        self._name = name
        self._instance = instance

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        """Play one row."""
        returned = await with_deadline(self._run(row, model), None)  # the runner has the deadline
        return read_outcome(returned, name=self._name)

    def release(self, trajectory: Trajectory) -> None:
        """Pass on to the instance, if it has the method."""
        release = getattr(self._instance, "release", None)
        if callable(release):
            release(trajectory)

    def close(self) -> None:
        """Close the instance, if it has the method."""
        close = getattr(self._instance, "close", None)
        if inspect.iscoroutinefunction(close):
            # in a thread: it may hang, and the caller may run an event loop
            handle = InstanceHandle(self._instance, UserThread(f"close {self._name}"))
            handle.close()
            handle.join(CLOSE_TIMEOUT_S)
        elif callable(close):
            with suppress(Exception):  # the run has ended
                close()
