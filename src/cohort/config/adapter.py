"""The `model.adapter` section: LoRA and its variants."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from cohort.config.paths import InputPath
from cohort.config.section import Section, must_be


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
