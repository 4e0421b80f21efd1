"""Versions of Python and of packages: those installed, and those that Cohort was tested with."""

import platform
import re
import sys
from importlib import metadata

# Oldest and newest version on which the tests have passed. README.md and docs/gpu.md show them (`make docs`).
TESTED: dict[str, tuple[str, str]] = {
    "python": ("3.11", "3.14"),
    "torch": ("2.11.0", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "vllm": ("0.32.0", "0.32.0"),
}
_DISTRIBUTIONS = {"cohort": "cohort-rl", "torch": "torch", "transformers": "transformers", "vllm": "vllm"}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter to a run."""
    found = {"python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def newer_than_tested(name: str, version: str) -> str | None:
    """Return a sentence if a version's major or minor number is newer than any that was tested, else None."""
    newest = TESTED[name][1]
    if release(version) <= release(newest):
        return None
    shown = {"python": "Python", "vllm": "vLLM"}.get(name, name)
    return f"{shown} {version} is newer than {newest}, which Cohort was tested with"


def untested_versions() -> list[str]:
    """Describe what this process has loaded in a version newer than any that was tested. vLLM has its own process."""
    found = {name: version for name, version in versions().items() if name in ("torch", "transformers")}
    loaded = {name: version for name, version in found.items() if name in sys.modules}
    if loaded:
        loaded["python"] = platform.python_version()
    notes = (newer_than_tested(name, version) for name, version in loaded.items())
    return [note for note in notes if note is not None]


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version such as 2.13.0+cpu or 5.25.0.dev0."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def tested_table() -> list[str]:
    """Return the lines of a Markdown table of the tested versions."""
    shown = {"python": "Python", "torch": "PyTorch", "vllm": "vLLM"}
    rows = [f"| {shown.get(name, name)} | {oldest} | {newest} |" for name, (oldest, newest) in TESTED.items()]
    return ["| | oldest tested | newest tested |", "| --- | --- | --- |", *rows]
