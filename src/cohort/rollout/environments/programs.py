"""Programs that play a row: one turn, the user's own `run(row, model)`, and a mixture of environments."""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping
from itertools import accumulate
from typing import Any

from cohort.records import ModelCall, Prompt, Trajectory
from cohort.rollout.engines.base import CallKey, Generate, SamplingParams
from cohort.rollout.environments.child_process import ChildPool
from cohort.rollout.environments.environment_class import group_fraction, reset_seed
from cohort.rollout.environments.handle import close_instance, with_deadline
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.trajectory import Outcome, Program, Row, read_outcome
from cohort.rollout.stop_strings import cut_at_stop, text_of


async def answer_prompt(
    generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
) -> Trajectory:
    """Sample one completion of a prompt with a single model call."""
    return completion(await generate(prompt.token_ids, sampling, key), tokenizer, sampling)


def completion(call: ModelCall, tokenizer: Any, sampling: SamplingParams) -> Trajectory:
    """Return the trajectory of a prompt's only call."""
    call = cut_at_stop(call, sampling.stop, tokenizer)
    return Trajectory.single_turn(call, text=text_of(call, tokenizer))


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
        close_instance(self._instance, self._name)


COLUMN = "environment"


class Mixture:
    """A program that lets one of several play each row."""

    def __init__(self, programs: Mapping[str, Program], weights: Mapping[str, float]):
        """Create the program.

        Args:
            programs: by the value of the column.
            weights: shares of rows that lack the column.
        """
        self._programs = programs
        self._names = list(programs)
        self._bounds = list(accumulate(weights[name] for name in self._names))

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        """Play one row. All trajectories of a group have the same environment."""
        name = row.get(COLUMN)
        if name is None:
            name = self._names[bisect_right(self._bounds[:-1], group_fraction(model.key) * self._bounds[-1])]
        if name not in self._programs:
            raise EnvironmentFailure(f"column {COLUMN!r}: {name!r} is none of {', '.join(self._names)}")
        others = {column: value for column, value in row.items() if column != COLUMN}
        return await self._programs[name].run(others, model)

    def release(self, trajectory: Trajectory) -> None:
        """Reuse or close the trajectory's environment."""
        for program in self._programs.values():
            program.release(trajectory)

    def close(self) -> None:
        """Close all environments."""
        for program in self._programs.values():
            program.close()
