"""Sizes in human units: 5GB, 500MB, 79.2GiB."""

import re
from typing import Annotated

from pydantic import AfterValidator

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
