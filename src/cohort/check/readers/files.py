"""Read untrusted text files."""

import json
from pathlib import Path

from cohort.errors import UserError

MAX_BYTES = 500_000
_LEVELS_UP = 2  # from a script to where it is started


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        UserError: it is missing, not a file, not text, or too large to be a configuration.
    """
    try:
        problem = _no_file(path)
        if problem is None and path.stat().st_size > MAX_BYTES:
            problem = f"larger than {MAX_BYTES:,} bytes, which no configuration is"
        text = path.read_text(encoding="utf-8-sig") if problem is None else ""
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return text


def _no_file(path: Path) -> str | None:
    """Why a path is not a file; None if it is one."""
    if path.is_dir():
        return "is a folder; name the files in it"
    if path.is_file():
        return None
    return "is not a plain file" if path.exists() else "no such file"


def notebook_code(text: str) -> str:
    """Extract the Python code of a notebook. Line numbers count within it.

    Raises:
        ValueError: not a notebook.
    """
    book = json.loads(text)
    cells = book.get("cells", []) if isinstance(book, dict) else []
    found = [cell.get("source", "") for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    lines = "\n".join("".join(map(str, part)) for part in found).splitlines()
    return "\n".join("pass" if line.startswith(("!", "%")) else line for line in lines)


def find_text(name: str, folder: Path) -> tuple[Path, str]:
    """Read a file that another one names: next to it, in the folders above it, or in the working directory.

    Raises:
        UserError: it cannot be read.
    """
    tries = [place / name for place in (folder, *folder.resolve().parents[:_LEVELS_UP], Path())]
    path = next((candidate for candidate in tries if _no_file(candidate) is None), tries[0])
    return path, read_text(path)
