"""Paths within a run folder. The page reads nothing outside of the folders it was given."""

import errno
import os
from pathlib import Path


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
