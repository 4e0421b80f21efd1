"""The `model.adapter` section: a few weights that are trained in the place of the model's own."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from cohort.config.section import Section


class AdapterConfig(Section):
    """LoRA (arXiv:2106.09685) and its variants, by peft: the model's weights are frozen, the adapter's are float32."""

    kind: Literal["lora"] = Field("lora", description="What is added to the frozen weights.")
    rank: int = Field(16, ge=1, description="Rank of the addition to each weight.")
    alpha: float = Field(
        32.0, gt=0, description="The addition is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."
    )
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Layers that get one, by the last parts of their names, such as [q_proj, v_proj]. all-linear: "
        "every linear layer but the head. lm_head and embed_tokens may be named too.",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout before the addition. Completions could not share their prompt's random numbers, so "
        "micro-batches are computed in padded rows then.",
    )
    rslora: bool = Field(False, description="Rank-stabilised scaling (arXiv:2312.03732).")
    dora: bool = Field(False, description="Weights as magnitude and direction (arXiv:2402.09353).")
    path: str | None = Field(
        None,
        min_length=1,
        description="Go on from this adapter, a folder that peft has saved, with its rank, alpha, targets, rslora and "
        "dora; what is given of these has to agree. The reference policy is the model with this adapter.",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _all_or_names(cls, value: Any) -> Any:
        if value == "all-linear" or (
            isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value)
        ):
            return value
        raise ValueError("must be all-linear or a list of names, such as [q_proj, v_proj]")

    @model_serializer(mode="wrap")
    def _without_what_path_says(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A default that `path` decides is not written down as if it had been given."""
        values: dict[str, Any] = plain(self)
        return values if self.path is None else {key: values[key] for key in values if key in self.model_fields_set}
