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
        if path.is_dir():
            raise UserError(f"{path}: is a folder; name the files in it")
        if not path.is_file():
            raise UserError(f"{path}: {'is not a plain file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes, which no configuration is")
    if b"\0" in raw:
        raise UserError(f"{path}: a binary file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
