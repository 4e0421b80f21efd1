"""Write files and folders atomically: under a temporary name, flushed to disk and renamed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cohort.errors import TrainingError

_WRITING = ".writing-"  # name prefix of an unfinished folder
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)


def remove_leftovers(root: Path) -> None:
    """Delete files and folders that a killed run left half-written or half-deleted."""
    for leftover in (*root.glob(f"{_WRITING}*"), *root.glob(".deleting-*")):
        shutil.rmtree(leftover)
    for leftover in root.glob(".*.partial"):
        leftover.unlink()


def write_folder_atomically(final: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder, flush that to disk and rename it to `final`.

    Raises:
        TrainingError: writing failed, e.g. the disk is full; nothing is left behind.
    """
    temporary = final.with_name(f"{_WRITING}{final.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        with disk_errors(final):
            temporary.mkdir(parents=True)
            write(temporary)
            for path in (*temporary.rglob("*"), temporary):
                flush(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    flush(final.parent)


@contextmanager
def write_file_atomically(final: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then flush it to disk and rename it to `final`.

    Raises:
        TrainingError: writing failed, e.g. the disk is full; `final` is unchanged.
    """
    partial = final.with_name(f".{final.name}.partial")
    try:
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            flush(partial)
            partial.replace(final)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system while writing `path` into a `TrainingError`."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        # safetensors, tokenizers and torch have their own types of errors, with the system's message in the text
        what = next((text for text in map(os.strerror, _DISK_ERRORS) if text in str(error)), None)
        if what is None:
            raise
        raise TrainingError(
            f"{path.with_name(path.name.removeprefix(_WRITING))}: {what.lower()}. Earlier checkpoints are intact: "
            f"correct this, such as by freeing space, and run the same command again to resume from the last one"
        ) from error


def flush(path: Path) -> None:
    """Flush a file or the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
