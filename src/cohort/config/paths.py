"""Types of keys that hold paths: found when a configuration is loaded, so that it works from any directory.

`config_from_dict` gives the folders to search as pydantic's validation context. A name that none of them has stays as
it is: a Hub id, or missing, which whoever reads it reports. A `KeptPath` may be created later, in the first folder.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo


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
    path = expand_home(path)
    # keep symlinks: a virtual environment's python is a link, and finds its packages by the link's path
    files = (str((folder / path).absolute()) for folder in info.context or () if os.path.isfile(folder / path))
    return next(files, path)


InputPath = Annotated[str, Field(min_length=1), AfterValidator(_find)]
KeptPath = Annotated[str, Field(min_length=1), AfterValidator(_find_or_place)]
FunctionPath = Annotated[str, Field(min_length=1), AfterValidator(find_function)]
PythonPath = Annotated[str, AfterValidator(_find_python)]
