"""The `algorithm` section: one class for each algorithm, so that a key that it does not have is an error."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import Section

CORRECTION_CAP = 2.0


class PolicyGradientConfig(Section):
    """What the clipped policy-gradient algorithms have in common."""

    clip_low: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="The ratio is clipped from below at 1 - clip_low. It "
        "is exactly 1 at the first update of a rollout, so this matters with `train.updates_per_rollout` above 1.",
    )
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped from above at 1 + clip_high (as clip_low).")
    beta: float = Field(0.0, ge=0, description="Weight of the KL term (k3). Above 0 a reference model is loaded.")
    mask_truncated_completions: bool = Field(
        False, description="Completions that hit the token limit get no loss and do not count in its denominator."
    )
    sampling_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = Field(
        "auto",
        description="Importance weight of the policy against the sampler's, per token or per completion, on the policy "
        "loss: capped at sampling_correction_cap (truncate), or 0 above it (mask). auto: token_truncate with "
        "rollout.engine: vllm, none with local, whose sampler computes the same.",
    )
    sampling_correction_cap: float = Field(CORRECTION_CAP, ge=1, description="Largest importance weight.")

    @model_validator(mode="after")
    def _cap_has_an_effect(self) -> Self:
        if self.sampling_correction == "none" and self.sampling_correction_cap != CORRECTION_CAP:
            raise ValueError(
                "sampling_correction_cap has no effect with sampling_correction: none; remove one of the two"
            )
        return self


class GrpoConfig(PolicyGradientConfig):
    """GRPO (arXiv:2402.03300): mean and std per group, mean of sequence means."""

    name: Literal["grpo"] = Field("grpo", description="The algorithm.")
    std_epsilon: float = Field(1e-4, ge=0, description="Added to the group's standard deviation.")


class DrGrpoConfig(PolicyGradientConfig):
    """Dr. GRPO (arXiv:2503.20783): mean per group, sum over tokens divided by a constant."""

    name: Literal["dr_grpo"] = Field("dr_grpo", description="The algorithm.")


class DapoConfig(PolicyGradientConfig):
    """DAPO (arXiv:2503.14476): clip-higher and the token mean over the whole step."""

    name: Literal["dapo"] = Field("dapo", description="The algorithm.")
    clip_high: float = Field(0.28, ge=0, description="The ratio is clipped from above at 1 + clip_high (as clip_low).")
    std_epsilon: float = Field(1e-4, ge=0, description="Added to the group's standard deviation.")


AlgorithmConfig = Annotated[GrpoConfig | DrGrpoConfig | DapoConfig, Field(discriminator="name")]
