"""The `optim` section: one class per optimizer, so that a key that the optimizer lacks is an error."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import FunctionPath, Section

MUON_ON_HOST = (
    "updates would run on the host, where Muon's 15 matrix products per weight take minutes; use adamw, adamw_8bit or "
    "sgd, or keep the state on the GPU"
)


class ParameterGroup(Section):
    """Parameters with their own learning rate or weight decay."""

    match: str = Field(
        min_length=1,
        description="Name pattern of the parameters, such as lm_head.* or *.layers.0.*; the first matching group "
        "applies.",
    )
    learning_rate_factor: float = Field(1.0, ge=0, description="Factor on the learning rate; 0 freezes them.")
    weight_decay: float | None = Field(None, ge=0, description="Overrides `optim.weight_decay`.")


class BaseOptimConfig(Section):
    """Keys of all optimizers."""

    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay. Not applied to vectors (norms, biases) unless a group sets it."
    )
    groups: tuple[ParameterGroup, ...] = Field((), description="Parameter groups with their own settings.")
    offload: bool = Field(
        False,
        description="Keep the weights in `model.dtype` and the optimizer state in host memory and update them there; "
        "the GPU keeps a copy of the weights in `model.compute_dtype`. GPUs only; not with muon or an "
        "adapter.",
    )


class StochasticRoundingConfig(BaseOptimConfig):
    """Keys of optimizers that support stochastic rounding."""

    stochastic_rounding: bool = Field(
        False,
        description="Round updated bfloat16 weights stochastically (unbiased), so that small updates are not lost. "
        "With `model.dtype: bfloat16`; the optimizer state is then float32 (adamw_8bit: 8 bits).",
    )

    @model_validator(mode="after")
    def _check_stochastic_rounding(self) -> Self:
        if self.stochastic_rounding and self.offload:
            raise ValueError(
                "stochastic_rounding is for bfloat16 weights without a wider copy, and offload: true has room for one "
                "in host memory; remove stochastic_rounding, and use model.dtype: float32"
            )
        return self


class AdamConfig(StochasticRoundingConfig):
    """Keys of the AdamW variants."""

    beta1: float = Field(0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay rate of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")


class AdamwConfig(AdamConfig):
    """AdamW (arXiv:1711.05101). State: two values per weight, in the weight's dtype."""

    name: Literal["adamw"] = Field("adamw", description="The optimizer.")


class Adamw8bitConfig(AdamConfig):
    """AdamW with 8-bit moments in blocks of 256 (arXiv:2110.02861), by torchao. State: two bytes per weight."""

    name: Literal["adamw_8bit"] = Field("adamw_8bit", description="The optimizer.")


class AdafactorConfig(BaseOptimConfig):
    """Adafactor (arXiv:1804.04235): second moments of a matrix are factored into row and column means.

    The learning rate is relative to a weight's root mean square.
    """

    name: Literal["adafactor"] = Field("adafactor", description="The optimizer.")
    beta2_decay: float = Field(
        -0.8, lt=0, description="The second moment's decay rate at step t is 1 - t ** beta2_decay."
    )
    clip_threshold: float = Field(
        1.0, ge=1, description="Maximum root mean square of an update, relative to the weight's."
    )


class MuonConfig(AdamConfig):
    """Muon (arXiv:2502.16982) for the layers' matrices; AdamW for embeddings, heads, vectors and fused experts.

    A matrix's update is scaled to AdamW's root mean square, so that one learning rate serves both.
    """

    name: Literal["muon"] = Field("muon", description="The optimizer.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Nesterov momentum of the matrices' gradients.")

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload:
            raise ValueError(f"offload: true with name: muon: {MUON_ON_HOST}")
        return self


class SgdConfig(StochasticRoundingConfig):
    """Stochastic gradient descent, with optional momentum."""

    name: Literal["sgd"] = Field("sgd", description="The optimizer.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum; 0: none, and no state.")


class CustomOptimConfig(BaseOptimConfig):
    """An optimizer of your own. Its state counts as AdamW's in the plan.

    Its parameter groups have their own learning rates, which `train.lr_schedule` and warmup scale, unless it brings a
    scheduler.
    """

    name: Literal["custom"] = Field("custom", description="The optimizer.")
    use: FunctionPath = Field(
        description="`file.py:name` or `package.module:name` of a `torch.optim.Optimizer` class, or of a function that "
        "returns one, or one with its `LRScheduler`. It is called with the list of trained parameters, or with them by "
        "name if its argument is called `named_parameters`.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments, such as `{lr: 1.0e-5}`.")

    @model_validator(mode="after")
    def _check_own_keys(self) -> Self:
        for key in ("weight_decay", "groups", "offload"):
            self.refuse(key, "name: custom", "set it in args, or use another optimizer")
        return self


OptimConfig = Annotated[
    AdamwConfig | Adamw8bitConfig | AdafactorConfig | MuonConfig | SgdConfig | CustomOptimConfig,
    Field(discriminator="name"),
]
