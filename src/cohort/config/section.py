"""Base class of all configuration sections."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen configuration section; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_bool_for_number(cls, values: Any) -> Any:
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields:
                annotation = cls.model_fields[key].annotation
                kinds = {annotation, *get_args(annotation)}
                if {int, float} & kinds and bool not in kinds:
                    raise ValueError(f"{key}: {value!r}: must be a number")
        return values
