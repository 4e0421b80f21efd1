"""The second model of algorithms that foresee rewards, as plans know it."""

from cohort.config import Config
from cohort.plan.shape import ModelShape, known_shape


def critic_shape(config: Config, shape: ModelShape) -> ModelShape | None:
    """Of the critic; None where the algorithm has none.

    Args:
        config: of the run.
        shape: of the policy, which stands in for a model of `critic.path` whose shape is not known here.
    """
    if not config.algorithm.needs_critic:
        return None
    path = config.critic.path if config.critic else None
    return ((known_shape(path) if path else None) or shape).as_critic()
