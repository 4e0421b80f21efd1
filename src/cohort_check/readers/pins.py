"""The version of a framework that a launch file, or a file beside it, pins; copies of a framework beside it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cohort.errors import UserError
from cohort_check.launch import Setting
from cohort_check.readers.files import read_text
from cohort_check.rules.common import FRAMEWORKS, WRAPS, key_tables, parse_version

_FILES = ("requirements*.txt", "requirements/*.txt", "pyproject.toml", "environment*.y*ml", "setup.py", "*.lock")
_LEVELS_UP = 4
_NUMBER = r"v?(\d+(?:\.\d+)+)"


def pinned_version(framework: str, path: Path, text: str) -> Setting | None:
    """The version that a file installs itself, else that of the files beside it or in the folders above it."""
    framework = WRAPS.get(framework, framework)
    if "package" not in FRAMEWORKS.get(framework, ()):
        return None
    package, copies = FRAMEWORKS[framework]["package"], FRAMEWORKS[framework]["copies"]
    if found := _pin(text, framework, package, path.name):
        return found
    for place in _around(path.parent):
        for file in (file for name in _FILES for file in sorted(place.glob(name))[:20]):
            with suppress(UserError):
                if found := _pin(read_text(file), framework, package, file.name):
                    return found
    for copy, file in ((name, file) for name in copies for file in find_copies(path.parent, name)):
        with suppress(UserError):
            if match := re.search(rf"(?:^|__version__\s*=\s*[\"']){_NUMBER}", read_text(file).strip()):
                return Setting(match[1], copy, added=True)
    return None


def _around(folder: Path) -> list[Path]:
    """A folder and those above it, up to that of the repository."""
    places = [folder.resolve(), *folder.resolve().parents[:_LEVELS_UP]]
    last = next((i for i, place in enumerate(places) if (place / ".git").exists()), len(places) - 1)
    return places[: last + 1]


def find_copies(folder: Path, name: str) -> Iterator[Path]:
    """Yield what a copy of a framework around a folder has by this name, nearest first.

    In a repository the copy may also be in a folder beside those above, such as `src/verl` or `third_party/verl`.
    """
    places = _around(folder)
    beside = ("", "*/", "*/*/") if (places[-1] / ".git").exists() else ("",)
    yield from (found for place in places for more in beside for found in sorted(place.glob(more + name))[:20])


def _pin(text: str, framework: str, package: str, name: str) -> Setting | None:
    """`trl==0.18.0`, `trl~=0.18.1`, `trl<0.19`, `trl @ git+...@v0.18.0`, or the entry of a lock file."""
    comments = "" if name.endswith((".py", ".ipynb")) else "#"  # which install nothing, except in scripts of uv
    start = rf"(?mi)^[^{comments}\n]*?(?<![\w./-]){package}(?![\w-])(?:\[[^\]\n]*\])?[\"']?\s*"
    exact = re.search(rf"{start}(?:={{2,3}}|=|@[^\n]*@)\s*{_NUMBER}(?![.\d]*\*)", text)
    exact = exact or re.search(rf"(?mi)^name = \"{package}\"\nversion = \"{_NUMBER}", text)
    if exact:
        return Setting(exact[1], _place(text, name, exact))
    bound = re.search(rf"{start}(?:[<>=!]+\s*[\d.]+,\s*)*(~=|<=?|==)\s*{_NUMBER}", text)
    if bound is None:
        return None
    number, tables = parse_version(bound[2]), list(key_tables(framework))
    if bound[1] == "<":
        below = [table for table in tables if table < number]
    else:
        size = len(number) - (bound[1] == "~=")
        below = [table for table in tables if table[:size] <= number[:size]]
    added = bound[1][0] == "<" and "<"
    return Setting(".".join(map(str, below[-1])), _place(text, name, bound), added) if below else None


def _place(text: str, name: str, match: re.Match[str]) -> str:
    return f"{name}:{text.count(chr(10), 0, match.start(1)) + 1}"
