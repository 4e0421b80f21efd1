"""The `model` section."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cohort.config.adapter import AdapterConfig
from cohort.config.quantization import KINDS, Quantization, check_base
from cohort.config.section import Section


class ModelConfig(Section):
    """The policy: a Hugging Face causal language model."""

    path: str = Field(
        min_length=1, description="Model folder (safetensors, config.json, tokenizer) or Hugging Face model id."
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="Dtype of the trained weights and of the optimizer state. bfloat16 halves both, and updates that "
        "are small beside a weight are rounded away: it needs a learning rate of 1e-5 or more.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype of matrix products (autocast; with several processes, of the gathered weights). auto: "
        "bfloat16 on GPUs, the weights' dtype on CPU. Logits and logprobs are float32 or wider always.",
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute activations in backward: less memory, about a third more time. selective: keep "
        "attention, whose cost is quadratic in the length, and the products around it; recompute the rest.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep what layers save for backward in pinned host memory (GPUs only). With gradient_checkpointing "
        "that is each layer's input.",
    )
    parameter_offload: bool = Field(
        False,
        description="Keep weights, gradients and the optimizer's state in host memory (GPUs only); each layer's "
        "weights visit the GPU when it computes, in forward and in backward, and updates are made on the host. In "
        "place of `optim.offload`; not with muon.",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Weights that are not trained, and have no gradient and no optimizer state: patterns for their "
        "names, such as `model.embed_tokens.*`. `routers` stands for those of a mixture of experts.",
    )
    trust_remote_code: bool = Field(False, description="Run model code that comes with the model folder.")
    adapter: AdapterConfig | None = Field(None, description="Train an adapter, and leave the model's weights frozen.")
    quantization: Quantization | None = Field(
        None, description=f"With an adapter (QLoRA), on one process: the frozen weights in fewer bits. {KINDS}."
    )

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _on_off_or_selective(cls, value: Any) -> Any:
        if isinstance(value, bool) or value == "selective":
            return value
        raise ValueError("must be true, false or selective")

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> Self:
        if self.quantization is not None:
            check_base(self.quantization, has_adapter=self.adapter is not None, dtype=self.dtype)
        return self

    @model_validator(mode="after")
    def _freeze_has_an_effect(self) -> Self:
        if self.freeze and self.adapter is not None:
            raise ValueError(
                "freeze has no effect with adapter, which leaves all of the model's own weights as they are; remove "
                "one of the two"
            )
        return self

    @model_validator(mode="after")
    def _autocast_has_an_effect(self) -> Self:
        if self.compute_dtype not in ("auto", self.dtype) and (self.dtype, self.compute_dtype) != (
            "float32",
            "bfloat16",
        ):
            raise ValueError(
                f"compute_dtype: {self.compute_dtype} has no effect on weights of dtype: {self.dtype}; use auto, "
                f"{self.dtype}, or dtype: float32 with compute_dtype: bfloat16"
            )
        return self
