"""JSON of whole conversations, two to three times as fast as by Python's module."""

import json
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json, to_json


def encode(value: Any, *, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as JSON in UTF-8.

    Args:
        value: the value.
        default: converts what is neither JSON nor known to pydantic, which writes sets as lists, dataclasses as
            objects, bytes as text and dates in ISO 8601.

    Raises:
        TypeError: a part of it cannot be written, and there is no `default`.
        ValueError: it contains itself.
    """
    try:
        return to_json(value, fallback=default)
    except ValueError:  # half of a surrogate pair, which a model may write in the arguments of a tool
        return json.dumps(value, default=default, separators=(",", ":")).encode()


def decode(content: bytes) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return from_json(content)
    except ValueError:  # half of a surrogate pair, or many levels
        return json.loads(content)
