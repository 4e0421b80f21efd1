"""The `critic` section: the second model of algorithms that foresee rewards."""

from pydantic import Field

from cohort.config.section import Section


class CriticConfig(Section):
    """The critic of `algorithm.name: ppo`, trained beside the policy: a model of the same kind that ends in one number.

    The keys of `model` and `train` (dtypes, checkpointing, schedule, clipping) hold for it too.
    """

    path: str | None = Field(
        None,
        min_length=1,
        description="Model folder or id to begin with: a causal language model, or `checkpoints/step-N/critic` of "
        "another run. It has to have the policy's tokens. Default: `model.path`.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of its AdamW.")
    updates: int = Field(
        1,
        ge=1,
        description="Updates of the critic, on the same completions, for each one of the policy.",
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="The loss does not reward a value for moving further than this from where it was before the "
        "rollout's first update, so this matters with `updates` or `train.updates_per_rollout` above 1.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="First steps, in which the critic learns and the policy stays as it is."
    )
