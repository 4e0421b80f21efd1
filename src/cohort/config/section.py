"""Base class of all configuration sections."""

from collections.abc import Callable
from functools import reduce
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

    def refuse(self, key: str, because: str, instead: str = "remove one of the two") -> None:
        """Reject a key that has no effect, unless it has its default value: a run's config.yaml spells out every key.

        Args:
            key: name of a field, or `section.key`.
            because: completes the message "has no effect with ...".
            instead: what works.
        """
        *parents, name = key.split(".")
        section = reduce(getattr, parents, self)
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{key}: {value} has no effect with {because}; {instead}")


def must_be(rule: str, is_valid: Callable[[Any], bool]) -> BeforeValidator:
    """Validate a field of several types, with one error message for all wrong values.

    Args:
        rule: completes the message "must be ...".
        is_valid: whether a value, of any type, is allowed.
    """

    def check(value: Any) -> Any:
        if is_valid(value):
            return value
        raise ValueError(f"must be {rule}")

    return BeforeValidator(check)


def number_or(
    *words: str, rule: str, is_valid: Callable[[Any], bool], types: tuple[type, ...] = (int,)
) -> BeforeValidator:
    """Validate a field that takes a number or one of a few words.

    Args:
        words: allowed besides numbers, such as "auto".
        rule: completes the message "must be ...".
        is_valid: whether a number of an allowed type is in range.
        types: allowed types of the number.
    """
    return must_be(rule, lambda x: x in words if isinstance(x, str) else type(x) in types and is_valid(x))
