"""The `optim` section: one class for each optimizer, so that a key that it does not have is an error."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import Section

MUON_ON_HOST = (
    "updates would be made on the host, and Muon's takes 15 products of each whole matrix, which a processor needs "
    "minutes for; use adamw, adamw_8bit or sgd, or leave the state on the GPU"
)


class ParameterGroup(Section):
    """Weights that learn otherwise than the rest."""

    match: str = Field(
        min_length=1,
        description="Of which weights: a pattern for their names, such as lm_head.* or *.layers.0.*; the first "
        "group that matches counts.",
    )
    learning_rate_factor: float = Field(
        1.0, ge=0, description="Multiplies the learning rate; 0 leaves them as they are."
    )
    weight_decay: float | None = Field(None, ge=0, description="Instead of the section's.")


class BaseOptimConfig(Section):
    """What all optimizers have."""

    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay. Vectors (norms, biases) do not decay, unless a group says so."
    )
    groups: tuple[ParameterGroup, ...] = Field((), description="Weights that learn otherwise than the rest.")
    offload: bool = Field(
        False,
        description="Keep the weights in `model.dtype` and the optimizer's state in host memory, and update them "
        "there; the GPU keeps a copy of the weights in `model.compute_dtype`. On GPUs; not with muon, nor with an "
        "adapter.",
    )


class RoundedConfig(BaseOptimConfig):
    """What optimizers have whose updates can be rounded at random."""

    stochastic_rounding: bool = Field(
        False,
        description="Round updated bfloat16 weights up or down at random, right in the mean, so that small updates are "
        "not lost. With `model.dtype: bfloat16`; the optimizer's state is float32 then (adamw_8bit: 8 bits).",
    )

    @model_validator(mode="after")
    def _rounds_once(self) -> Self:
        if self.stochastic_rounding and self.offload:
            raise ValueError(
                "stochastic_rounding is for bfloat16 weights without a wider copy, and offload: true has room for one "
                "in host memory; remove stochastic_rounding, and use model.dtype: float32"
            )
        return self


class AdamConfig(RoundedConfig):
    """What AdamW's forms have in common."""

    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the mean of squares.")


class AdamwConfig(AdamConfig):
    """AdamW (arXiv:1711.05101): two numbers for each weight, in the weight's dtype."""

    name: Literal["adamw"] = Field("adamw", description="The optimizer.")


class Adamw8bitConfig(AdamConfig):
    """AdamW with two bytes for each weight: its moments in 8 bits, by blocks of 256 (arXiv:2110.02861), by torchao."""

    name: Literal["adamw_8bit"] = Field("adamw_8bit", description="The optimizer.")


class AdafactorConfig(BaseOptimConfig):
    """Adafactor (arXiv:1804.04235): of a matrix's squared gradients the means of rows and columns alone.

    The learning rate is relative: an update is that part of a weight's root mean square.
    """

    name: Literal["adafactor"] = Field("adafactor", description="The optimizer.")
    beta2_decay: float = Field(-0.8, lt=0, description="The squares' decay after t steps is 1 - t to this power.")
    clip_threshold: float = Field(
        1.0, ge=1, description="Largest root mean square of an update, beside 1 for a weight."
    )


class MuonConfig(AdamConfig):
    """Muon (arXiv:2502.16982) for the matrices of layers; AdamW for embeddings, heads, vectors and fused experts.

    A matrix's update has the root mean square of AdamW's, so that one learning rate serves both.
    """

    name: Literal["muon"] = Field("muon", description="The optimizer.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Of the matrices' gradients, with Nesterov's look ahead.")

    @model_validator(mode="after")
    def _updates_on_the_gpu(self) -> Self:
        if self.offload:
            raise ValueError(f"offload: true with name: muon: {MUON_ON_HOST}")
        return self


class SgdConfig(RoundedConfig):
    """Stochastic gradient descent: nothing, or one number, for each weight."""

    name: Literal["sgd"] = Field("sgd", description="The optimizer.")
    momentum: float = Field(0.0, ge=0, lt=1, description="0: none, and no state.")


OptimConfig = Annotated[
    AdamwConfig | Adamw8bitConfig | AdafactorConfig | MuonConfig | SgdConfig, Field(discriminator="name")
]
