"""The `reference` section: the reference model of the KL divergence."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.quantization import KINDS, Quantization
from cohort.config.section import Section


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
