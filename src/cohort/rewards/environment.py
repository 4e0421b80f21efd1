"""The reward that environments and agents give themselves."""

from collections.abc import Sequence

from cohort.records import Trajectory


class EnvironmentReward:
    """The reward of an environment, from its `get_reward()` and `step_reward()` or the value that it returned.

    None for trajectories that it did not score, or that another environment of a mixture played.
    """

    def __init__(self, name: str):
        """Create the reward of the environment or agent `name`."""
        self.__name__ = name

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """Return one reward per trajectory."""
        return [trajectory.rewards.get(self.__name__) for trajectory in trajectories]
