"""The `critic` section: the value model of algorithms such as PPO."""

from pydantic import Field

from cohort.config.paths import InputPath
from cohort.config.section import Section


class CriticConfig(Section):
    """The critic of `algorithm.name: ppo`, trained alongside the policy: a model of the same kind with a scalar head.

    The keys of `model` and `train` (dtypes, checkpointing, schedule, clipping) apply to it too.
    """

    path: InputPath | None = Field(
        None,
        description="Model folder or id to start from: a causal language model, or `checkpoints/step-N/critic` of "
        "another run. Must have the policy's tokenizer. Default: `model.path`.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate (AdamW).")
    updates: int = Field(
        1,
        ge=1,
        description="Critic updates per policy update, on the same completions.",
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="Clip range of the value loss around the values at the start of the rollout. Matters with "
        "`updates` or `train.updates_per_rollout` above 1.",
    )
    warmup_steps: int = Field(0, ge=0, description="Initial steps in which only the critic is trained.")
