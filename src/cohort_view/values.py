"""Values of a run folder, which may hold anything."""

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def get(value: Any, *keys: str) -> Any:
    """Return a nested value; None if it is missing or there is something else in its place."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """Return a nested mapping; empty if it is missing or something else."""
    found = get(value, *keys)
    return found if isinstance(found, Mapping) else {}


def number(value: Any, *keys: str) -> float | None:
    """Return a nested finite number; None if it is missing or something else."""
    found = get(value, *keys)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def integer(value: Any, *keys: str) -> int | None:
    """Return a nested whole number; None if it is missing or something else."""
    found = number(value, *keys)
    return int(found) if found is not None and found == int(found) else None


def text(value: Any, *keys: str) -> str | None:
    """Return a nested text; None if it is missing or something else."""
    found = get(value, *keys)
    return found if isinstance(found, str) else None


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a run folder, which need not exist.

    Args:
        folder: the run folder, or a folder in it.
        name: path of the file in it.

    Raises:
        PermissionError: the file is a link that leads outside of the folder, or lies below one.
    """
    real = os.path.realpath(folder / name)
    top = os.path.realpath(folder)
    if real != top and not real.startswith(top.rstrip(os.sep) + os.sep):
        raise PermissionError(errno.EACCES, "a link that leads outside of the run folder", name)
    return folder / name
