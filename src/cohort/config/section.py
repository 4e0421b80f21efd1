"""Base class of all configuration sections, and the types of keys that hold paths or sizes.

`config_from_dict` gives the folders to search as pydantic's validation context. A name that none of them has stays as
it is: a Hub id, or missing, which whoever reads it reports. A `KeptPath` may be created later, in the first folder.
"""

import os
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from cohort.config.objects import ALLOW_CALLABLE, ALLOW_ROWS


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


_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 1 << 20, "gib": 1 << 30, "g": 10**9}


def parse_size(text: str) -> int:
    """Convert a size such as 5GB (5,000,000,000 bytes) or 500MiB to bytes.

    Raises:
        ValueError: not a size; the message is written to follow the value.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is not None and not match[2] and float(match[1]):
        raise ValueError(f"has no unit; write {match[1]}GB or {match[1]}MB")
    if match is None or match[2].lower() not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2].lower()])):
        raise ValueError("is not a size; write it as 5GB or 500MB")
    return size


def _checked(text: str) -> str:
    parse_size(text)
    return text


Size = Annotated[str, AfterValidator(_checked)]  # keeps the text


def expand_home(path: str) -> str:
    """Replace a leading `~` by the user's home folder.

    Raises:
        ValueError: the user has none.
    """
    expanded = os.path.expanduser(path)
    if expanded == path and path.split("/")[0] == "~":
        raise ValueError("this user has no home folder for `~`; set HOME, or give a path without it")
    return expanded


def _find(path: str, info: ValidationInfo) -> str:
    forbidden = None
    for folder in info.context or ():
        candidate = folder / expand_home(path)
        try:
            candidate.stat()
            return str(candidate.resolve())
        except PermissionError:  # whoever reads it reports it
            forbidden = forbidden or str(candidate.absolute())
        except (OSError, ValueError):  # missing, or a name that no file can have
            continue
    return forbidden or path


def _find_or_place(path: str, info: ValidationInfo) -> str:
    """Place a file that may be created later in the first folder."""
    found = _find(path, info)
    return next((str((folder / expand_home(found)).absolute()) for folder in info.context or ()), found)


def _find_file(path: str, info: ValidationInfo) -> str:
    """Find a file. If it does not exist, return its path beside the YAML file, so that the error names that folder."""
    found = _find(path, info)
    first, *_, last = info.context or (Path(), Path())
    if found != path or first.resolve() == last.resolve() or not path.endswith(_FILE_ENDINGS):
        return found
    return str((first / expand_home(path)).resolve())


_FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".py")  # ids of datasets on the Hub do not end like this


def find_function(use: str, info: ValidationInfo) -> str:
    """Make the file of `file.py:function` absolute."""
    file, colon, function = use.rpartition(":")
    return f"{_find_file(file, info)}:{function}" if colon and file.endswith(".py") else use


def _find_python(path: str, info: ValidationInfo) -> str:
    path = expand_home(path)
    # keep symlinks: a virtual environment's python is a link, and finds its packages by the link's path
    files = (str((folder / path).absolute()) for folder in info.context or () if os.path.isfile(folder / path))
    return next(files, path)


InputPath = Annotated[str, Field(min_length=1), AfterValidator(_find)]
KeptPath = Annotated[str, Field(min_length=1), AfterValidator(_find_or_place)]
DataPath = Annotated[str, Field(min_length=1), AfterValidator(_find_file), ALLOW_ROWS]
FunctionPath = Annotated[str, Field(min_length=1), AfterValidator(find_function), ALLOW_CALLABLE]
PythonPath = Annotated[str, AfterValidator(_find_python)]


# What training and evaluation sample with
MinP = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Sample from the tokens with at least this fraction of the largest probability (arXiv:2407.01082); "
        "0 is off.",
    ),
]
RepetitionPenalty = Annotated[
    float,
    Field(
        gt=0,
        description="Divide positive logits by it, and multiply negative ones, of tokens that the context or the "
        "completion has already (CTRL, arXiv:1909.05858): above 1 they become less likely. 1 is off.",
    ),
]
