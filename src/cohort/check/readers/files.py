"""Text files of strangers: small, text, on this machine."""

from pathlib import Path

from cohort.errors import UserError

MAX_BYTES = 500_000


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it is missing, not a file, not text, or too large to be a configuration.
    """
    try:
        problem = _no_file(path)
        if problem is not None:
            raise UserError(f"{path}: {problem}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes, which no configuration is")
    if not raw.strip():
        raise UserError(f"{path}: is empty")
    if b"\0" in raw:
        raise UserError(f"{path}: a binary file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _no_file(path: Path) -> str | None:
    """What there is instead of a file; None: it is one."""
    if path.is_dir():
        return "is a folder; name the files in it"
    if path.is_file():
        return None
    return "is not a plain file" if path.exists() else "no such file"
