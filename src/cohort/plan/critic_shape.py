"""Shape of the critic (value model)."""

from cohort.config import Config
from cohort.plan.shape import ModelShape, try_read_shape


def critic_shape(config: Config, shape: ModelShape) -> ModelShape | None:
    """Shape of the critic, or None if the algorithm has none.

    Args:
        config: configuration of the run.
        shape: shape of the policy, used if the shape of `critic.path` is unknown.
    """
    if not config.algorithm.needs_critic:
        return None
    path = config.critic.path if config.critic else None
    return ((try_read_shape(path) if path else None) or shape).as_critic()
