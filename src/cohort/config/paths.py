"""Types of keys that hold paths: found when a configuration is loaded, so that it works from any directory.

`config_from_dict` gives the folders to search as pydantic's validation context. A name that none of them has stays as
it is: a Hub id, or missing, which whoever reads it reports. A `KeptPath` may be created later, in the first folder.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo


def _find(path: str, info: ValidationInfo) -> str:
    for folder in info.context or ():
        candidate = folder / os.path.expanduser(path)
        if os.path.exists(candidate):  # Path.exists raises for names that are too long
            return str(candidate.resolve())
    return path


def _find_or_place(path: str, info: ValidationInfo) -> str:
    """Place a file that may be created later in the first folder."""
    found = _find(path, info)
    return next((str((folder / os.path.expanduser(found)).absolute()) for folder in info.context or ()), found)


def find_function(use: str, info: ValidationInfo) -> str:
    """Make the file of `file.py:function` absolute."""
    file, colon, function = use.rpartition(":")
    return f"{_find(file, info)}:{function}" if colon and file.endswith(".py") else use


_ARGUMENT_PATHS = {  # arguments of built-in rewards that are paths
    "model": {"path": _find},
    "judge": {"prompt": _find, "cache": _find_or_place},
}


def find_argument_paths(use: str, args: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Make the paths among the arguments of a built-in reward absolute."""
    found = {name: find for name, find in _ARGUMENT_PATHS.get(use, {}).items() if isinstance(args.get(name), str)}
    return {**args, **{name: find(args[name], info) for name, find in found.items()}}


def _find_python(path: str, info: ValidationInfo) -> str:
    path = os.path.expanduser(path)
    # keep symlinks: a virtual environment's python is a link, and finds its packages by the link's path
    files = (str((folder / path).absolute()) for folder in info.context or () if os.path.isfile(folder / path))
    return next(files, path)


InputPath = Annotated[str, Field(min_length=1), AfterValidator(_find)]
KeptPath = Annotated[str, Field(min_length=1), AfterValidator(_find_or_place)]
FunctionPath = Annotated[str, Field(min_length=1), AfterValidator(find_function)]
PythonPath = Annotated[str, AfterValidator(_find_python)]
