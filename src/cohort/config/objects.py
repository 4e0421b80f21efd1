"""Python objects where a configuration file has a path: functions and classes, and rows of data."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel, WrapValidator

USER_FILE = "cohort_user_file_"  # begins the names of modules that were loaded from a path
_UNNAMED = "object:"  # begins the names of objects that no other process can load


class NamedObject(str):
    """The name of an object, which sections treat as the path that it stands for, together with the object.

    It is written to files and sent to other processes as the name alone: `file.py:function` or `module:function` for
    what can be loaded by it, and `object:TYPE` for everything else.
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> "NamedObject":
        """Give `value` a name."""
        named = super().__new__(cls, name)
        named.value = value
        return named

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def is_unnamed(path: str | None) -> bool:
    """Whether a path stands for an object that only the process that made it has."""
    return path is not None and path.startswith(_UNNAMED)


def name_callable(function: Callable[..., Any]) -> NamedObject:
    """Name a function or class by the file or module that has it, if that is where it can be found."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    try:
        found = reduce(getattr, name.split("."), sys.modules.get(str(module)))
    except AttributeError:  # defined in a function, or deleted
        found = None
    if found is function and module is not None and not module.startswith(("__main__", USER_FILE)):
        return NamedObject(f"{module}:{name}", function)
    if found is function and file is not None and os.path.isfile(file):  # a script, not a notebook or a console
        return NamedObject(f"{os.path.abspath(file)}:{name}", function)
    return NamedObject(_UNNAMED + str(getattr(function, "__name__", type(function).__name__)), function)


def name_rows(rows: Any) -> NamedObject:
    """Name rows of data by their type.

    Raises:
        ValueError: not rows, or the splits of a dataset.
    """
    if isinstance(rows, Mapping):
        keys = ", ".join(map(str, rows)) or "none"
        raise ValueError(f"must be rows, and is a mapping with the keys {keys}; give one split, such as data['train']")
    if not isinstance(rows, Iterable) or isinstance(rows, bytes):
        raise ValueError("must be a path, or rows: a list of dicts, a datasets.Dataset, or an iterator of dicts")
    kind = type(rows).__name__
    return NamedObject(_UNNAMED + kind, list(rows) if isinstance(rows, Iterator) else rows)  # may be read again


def _callable_or_text(value: Any, validate: Callable[[Any], str]) -> str:
    if isinstance(value, NamedObject):
        return value
    return name_callable(value) if callable(value) else validate(value)


def _rows_or_text(value: Any, validate: Callable[[Any], str]) -> str:
    if isinstance(value, NamedObject):
        return value
    return validate(value) if isinstance(value, str) else name_rows(value)


ALLOW_CALLABLE, ALLOW_ROWS = WrapValidator(_callable_or_text), WrapValidator(_rows_or_text)


def unnamed_objects(value: Any, field: str = "") -> Iterator[tuple[str, NamedObject]]:
    """Yield the objects in a configuration that other processes cannot load, by key.

    Args:
        value: the configuration, or a value in it.
        field: key of the value.
    """
    if isinstance(value, NamedObject):
        if is_unnamed(value):
            yield field, value
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, BaseModel):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif hasattr(value, "use"):  # a component of the algorithm
        inner = [("use", value.use)]
    for key, entry in inner:
        yield from unnamed_objects(entry, f"{field}.{key}" if field else str(key))
