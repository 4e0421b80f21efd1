"""The `reference` section: the model that a KL divergence is measured from."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.quantization import KINDS, Quantization
from cohort.config.section import Section


class ReferenceConfig(Section):
    """The model that a KL divergence is measured from (`algorithm.beta` above 0): by default the model as it came."""

    device: Literal["auto", "cpu"] = Field(
        "auto",
        description="Where its weights lie between uses. auto: beside the policy's. cpu: in host memory, from where "
        "they are copied to the GPU for the one forward pass of a step, while there are no gradients; one process "
        "on a GPU.",
    )
    quantization: Quantization | None = Field(
        None, description=f"Its weights in fewer bits, on one process; KL is then measured from these. {KINDS}."
    )
    refresh_every: int = Field(
        0, ge=0, description="Every so many steps the reference moves towards the policy (TR-DPO); 0: never."
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
    def _quantized_weights_stay(self) -> Self:
        if self.quantization is not None and self.refresh_every:
            raise ValueError(
                f"quantization: {self.quantization} with refresh_every: {self.refresh_every}: weights in so few bits "
                f"cannot move towards the policy; remove one of the two"
            )
        if self.quantization is not None and self.device == "cpu":
            raise ValueError(
                f"quantization: {self.quantization} with device: cpu saves the same memory twice; use device: auto, or "
                f"no quantization"
            )
        return self

    @model_validator(mode="after")
    def _mix_has_an_effect(self) -> Self:
        if self.refresh_every == 0 and self.mix is not None:
            raise ValueError(f"mix: {self.mix} has no effect with refresh_every: 0; remove it, or set refresh_every")
        return self
