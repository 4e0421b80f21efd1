"""Values of a run folder, which may hold anything, and the JSON that the page gets."""

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

_ARROW_SOURCE = re.compile(r"Could not open Parquet input source '.*?': ")


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


def regular_file(folder: Path, name: str) -> Path:
    """Return the path of a file to open, after a check that it is one: to open a pipe could take forever.

    Raises:
        OSError: there is none, it is not a regular file, or `inside` refuses it.
    """
    path = inside(folder, name)
    if not S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    return path


def reason(error: Exception) -> str:
    """Say in one line why a file cannot be read, without the path that Arrow names."""
    detail = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return _ARROW_SOURCE.sub("", " ".join(detail.split()), count=1)[:200].rstrip(".")


def to_json(value: Any) -> str:
    """Return JSON in ASCII. NaN and infinities become null, numpy values plain ones, anything else its text."""
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and np.isfinite(value).all():
            return value.tolist()
        return [_plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return str(value)
