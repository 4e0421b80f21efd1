"""Several environments in one run: the row's column `environment` selects one, else one is drawn by weight."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from cohort.records import Trajectory
from cohort.rollout.environments.environment_class import group_fraction
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.trajectory import Outcome, Program, Row

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
