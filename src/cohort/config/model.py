"""The `model` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cohort.config.adapter import AdapterConfig
from cohort.config.paths import InputPath
from cohort.config.quantization import KINDS, Quantization, check_base
from cohort.config.section import Section, must_be


class ModelConfig(Section):
    """The policy: a Hugging Face causal language model."""

    path: InputPath = Field(description="Model folder (safetensors, config.json, tokenizer) or Hugging Face model id.")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="Dtype of the trained weights and of the optimizer state. bfloat16 halves both, but rounds away "
        "updates that are small relative to a weight: it needs a learning rate of 1e-5 or more. Gradients are added up "
        "in float32 in any case.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype of matrix products (autocast; with several processes, of the gathered weights). auto: "
        "bfloat16 on GPUs, the weights' dtype on CPU. Logits and logprobs are always float32 or wider.",
    )
    gradient_checkpointing: Annotated[
        bool | Literal["selective"],
        must_be("true, false or selective", lambda x: isinstance(x, bool) or x == "selective"),
    ] = Field(
        False,
        description="Recompute activations in backward: less memory, about a third slower. selective: save attention "
        "outputs, which cost quadratic time, and the adjacent projections; recompute the rest.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep activations saved for backward in pinned host memory (GPUs only). With "
        "gradient_checkpointing these are the layers' inputs.",
    )
    parameter_offload: bool = Field(
        False,
        description="Keep weights, gradients and optimizer state in host memory (GPUs only). Each layer's weights are "
        "copied to the GPU for forward and backward, and updates run on the host. Replaces "
        "`optim.offload`; not with muon.",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Parameters to freeze (no gradient, no optimizer state), as name patterns such as "
        "`model.embed_tokens.*`. `routers` means the routers of a mixture-of-experts model.",
    )
    dropout: bool = Field(
        False,
        description="Train with the dropout of the model's config.json. It is off by default, since logprobs would be "
        "those of another policy than the one that sampled. With it, prompts are not shared and rows are padded.",
    )
    trust_remote_code: bool = Field(False, description="Run model code from the model folder.")
    adapter: AdapterConfig | None = Field(None, description="Train an adapter and freeze the model's weights.")
    quantization: Quantization | None = Field(
        None, description=f"Quantize the frozen weights (QLoRA); needs an adapter and one process. {KINDS}."
    )

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.quantization is not None:
            check_base(self.quantization, has_adapter=self.adapter is not None, dtype=self.dtype)
        if self.freeze and self.adapter is not None:
            raise ValueError(
                "freeze has no effect with adapter, which leaves all of the model's own weights as they are; remove "
                "one of the two"
            )
        if self.compute_dtype not in ("auto", self.dtype) and (self.dtype, self.compute_dtype) != (
            "float32",
            "bfloat16",
        ):
            raise ValueError(
                f"compute_dtype: {self.compute_dtype} has no effect on weights of dtype: {self.dtype}; use auto, "
                f"{self.dtype}, or dtype: float32 with compute_dtype: bfloat16"
            )
        return self
