"""The `model.adapter` section: a few weights that are trained in the place of the model's own."""

from typing import Literal

from pydantic import Field

from cohort.config.section import Section


class AdapterConfig(Section):
    """LoRA (arXiv:2106.09685) and its variants, through peft. The model's own weights are frozen."""

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
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the addition.")
    rslora: bool = Field(False, description="Rank-stabilised scaling (arXiv:2312.03732).")
    dora: bool = Field(False, description="Weights as magnitude and direction (arXiv:2402.09353).")
    path: str | None = Field(
        None, min_length=1, description="Go on from this adapter, a folder that peft has saved; its shape is used."
    )
