"""The sections of models: `model` with `model.adapter`, `reference` and `critic`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from cohort.config.section import InputPath, Section, must_be

Quantization = Literal["nf4", "int8", "fp8"]
# Help text; see docs/quantization.md for memory and cost.
KINDS = (
    "nf4: 4 bits, by bitsandbytes (arXiv:2305.14314); int8 and fp8: 8 bits, by torchao. Linear layers except the LM "
    "head; each weight is dequantized to the compute dtype when used"
)
ONE_PROCESS = "needs a single process: quantized weights cannot be sharded; use hardware.processes: 1"


def check_base(kind: Quantization, *, has_adapter: bool, dtype: str) -> None:
    """Check `model.quantization` against the rest of its section.

    Raises:
        ValueError: the settings are incompatible.
    """
    if not has_adapter:
        raise ValueError(
            f"quantization: {kind} without adapter: quantized weights cannot be trained; add an adapter, such as "
            f"{{rank: 16}}, or remove quantization"
        )
    if dtype == "float64":
        raise ValueError(
            f"quantization: {kind} with dtype: float64: quantized weights compute in float32 or bfloat16; use one of "
            f"these"
        )


def check_run(field: str, kind: Quantization, *, processes: int | str, engine: str, shares_weights: bool) -> None:
    """Check a quantization key against the run's processes and rollout engine.

    Raises:
        ValueError: the settings are incompatible.
    """
    if processes not in (1, "auto"):
        raise ValueError(f"{field}: {kind} {ONE_PROCESS}; hardware.processes is {processes}")
    if field == "model.quantization" and not shares_weights:
        raise ValueError(
            f"{field}: {kind} with rollout.engine: {engine}: servers load the unquantized base model, and would sample "
            f"from a different policy than the trained one; use rollout.engine: local, or no quantization"
        )


def _is_targets(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) and name for name in value)
    return is_list or value == "all-linear"


class AdapterConfig(Section):
    """LoRA (arXiv:2106.09685) and its variants, through peft. Base weights are frozen, adapter weights are float32."""

    kind: Literal["lora"] = Field("lora", description="Adapter type.")
    rank: int = Field(16, ge=1, description="LoRA rank.")
    alpha: float = Field(
        32.0, gt=0, description="LoRA scaling: the update is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."
    )
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...],
        must_be("all-linear or a list of names, such as [q_proj, v_proj]", _is_targets),
    ] = Field(
        "all-linear",
        description="Modules to adapt, by the last parts of their names, such as [q_proj, v_proj]. all-linear: every "
        "linear layer except the LM head. lm_head and embed_tokens may be listed too.",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout on the adapter's input. Completions cannot share their prompt's dropout mask, so prompts "
        "are not shared and micro-batches are padded.",
    )
    rslora: bool = Field(False, description="Rank-stabilized scaling (arXiv:2312.03732).")
    dora: bool = Field(False, description="Decompose weights into magnitude and direction (arXiv:2402.09353).")
    path: InputPath | None = Field(
        None,
        description="Continue from this adapter, a folder saved by peft. Its rank, alpha, targets, rslora and dora "
        "are used; keys that are also set here must agree. The reference policy is the model with this "
        "adapter.",
    )

    @model_serializer(mode="wrap")
    def _serialize(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that were not set: with `path`, the saved adapter decides them."""
        values: dict[str, Any] = plain(self)
        return values if self.path is None else {key: values[key] for key in values if key in self.model_fields_set}


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
        bool | Literal["auto", "selective"],
        must_be("auto, true, false or selective", lambda x: isinstance(x, bool) or x in ("auto", "selective")),
    ] = Field(
        "auto",
        description="Recompute activations in backward: less memory, about a third slower. selective: save attention "
        "outputs, which cost quadratic time, and the adjacent projections; recompute the rest. auto: the fastest of "
        "false, selective and true that fits according to the plan; false on CPU and for models of unknown shape. A "
        "resumed run keeps the choice if it fits.",
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


class ReferenceConfig(Section):
    """The reference model of the KL divergence (`algorithm.beta` above 0); by default the initial model."""

    device: Literal["auto", "cpu"] = Field(
        "auto",
        description="Where its weights are kept. auto: on the GPU, alongside the policy's. cpu: in host memory; they "
        "are copied to the GPU for the step's one forward pass, when there are no gradients. cpu needs one "
        "process with a GPU.",
    )
    quantization: Quantization | None = Field(
        None,
        description=f"Quantize its weights (one process only); KL is then relative to the quantized model. {KINDS}.",
    )
    refresh_every: int = Field(
        0, ge=0, description="Move the reference towards the policy every N steps (TR-DPO); 0: never."
    )
    mix: float | None = Field(
        None,
        gt=0,
        le=1,
        description="With refresh_every: reference = mix * policy + (1 - mix) * reference. Default: 0.6.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        refreshes = isinstance(values, dict) and values.get("refresh_every") not in (None, 0)
        return {**values, "mix": 0.6} if refreshes and values.get("mix") is None else values

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.quantization is not None and self.refresh_every:
            raise ValueError(
                f"quantization: {self.quantization} with refresh_every: {self.refresh_every}: quantized weights "
                f"cannot move towards the policy; remove one of the two"
            )
        if self.quantization is not None and self.device == "cpu":
            raise ValueError(
                f"quantization: {self.quantization} with device: cpu save the same memory; use device: auto, or "
                f"no quantization"
            )
        if self.refresh_every == 0:
            self.refuse("mix", "refresh_every: 0", "remove it, or set refresh_every")
        return self


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
