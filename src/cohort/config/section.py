"""Base class of all configuration sections."""

from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


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


def number_or(
    *words: str, rule: str, is_valid: Callable[[Any], bool], types: tuple[type, ...] = (int,)
) -> BeforeValidator:
    """Validate a field that takes a number or one of a few words, with one error message for all wrong values.

    Args:
        words: allowed besides numbers, such as "auto".
        rule: completes the message "must be ...".
        is_valid: whether a number of an allowed type is in range.
        types: allowed types of the number.
    """

    def check(value: Any) -> Any:
        if value in words if isinstance(value, str) else type(value) in types and is_valid(value):
            return value
        raise ValueError(f"must be {rule}")

    return BeforeValidator(check)
