"""Where a run comes from: its command and commit without secrets, and the versions of packages.

Redaction hides too much rather than too little: a value shown as `***` costs a look into the file.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from cohort.config import ENGINES, ServersConfig

_SERVER_PACKAGES = [
    (package, section)
    for section in ENGINES.values()
    if issubclass(section, ServersConfig)
    for package in section.tested_versions
]
# Oldest and newest version on which the tests have passed. README.md and docs/gpu.md show them (`make docs`).
TESTED: dict[str, tuple[str, str]] = {
    "python": ("3.11", "3.14"),
    "torch": ("2.11.0", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    **{package: section.tested_versions[package] for package, section in _SERVER_PACKAGES},
}
_DISTRIBUTIONS = {
    "cohort": "cohort-rl",
    **{name: name for name in ("torch", "transformers", *(package for package, _ in _SERVER_PACKAGES))},
}
_SHOWN = {"python": "Python", **{package: section.program for package, section in _SERVER_PACKAGES}}


@cache  # looking for them takes tens of milliseconds, and a run starts with two looks
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter to a run."""
    found = {"python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(distribution)
    return found


def newer_than_tested(name: str, version: str) -> str | None:
    """Return a sentence if a version's major or minor number is newer than any that was tested, else None."""
    newest = TESTED[name][1]
    if release(version) <= release(newest):
        return None
    return f"{_SHOWN.get(name, name)} {version} is newer than {newest}, which Cohort was tested with"


def untested_versions() -> list[str]:
    """Describe what this process has loaded in a version newer than any that was tested. Servers are not in it."""
    found = versions()
    packages: tuple[str, ...] = ("torch", "transformers")
    loaded = {name: found[name] for name in packages if name in found and name in sys.modules}
    if loaded:
        loaded["python"] = platform.python_version()
    return [note for name, text in loaded.items() if (note := newer_than_tested(name, text)) is not None]


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version such as 2.13.0+cpu or 5.25.0.dev0."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


HIDDEN = "***"
_NAME = (  # the end of the name of a secret; that of `api_key_env` or `secret_file` is another
    r"(?:pass(?:word|wd|phrase|code)|pwd|secret|credentials?|authorization|cookie|headers?|signature|\bsig|dsn"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)token|(?:access|api|auth|private|secret)[_-]?key(?:_?id)?)(?![\w-])"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_SECRET = re.compile(
    rf"""
    (?P<before>                                             # what stays visible
        (?: {_NAME} [\\"']* \s* [=:]                        # `api_key=` or `"api_key":`
        | --[\w.-]{{0,80}}{_NAME} (?=\s) )                   # `--api-key`
        \s* (?: (?:bearer|basic) \s+ )?
    | \bbearer \s+ (?=\S{{8}}) )
    (?: \{{ [^}}]{{0,2000}} \}} | "(?:[^"\\]|\\.)*" | \\"[^"]*" | '[^']*' | [^\s'"]+ )
    | (?<=://) [^\s/?#'"]* (?=@)                            # user and password of an address
    | \b (?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|nvapi-|AKIA|AIza|eyJ) [\w.-]{{16,}}
    """,
    re.IGNORECASE | re.VERBOSE,
)
_FOLDERS = ("PWD", "OLDPWD")  # a shell's working directories, whose names look like that of a password
_MIN_LENGTH = 8  # of the value of an environment variable: shorter ones occur in other words


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret, such as `api_key`, `HF_TOKEN` or `headers.X-Own`; not `api_key_env`."""
    return _SECRET_NAME.search(key) is not None


def hide(value: Any, key: str = "") -> Any:
    """Hide the secrets in a value as read from JSON or YAML, or in the arguments of a command. Its shape stays.

    Args:
        value: mappings, lists and scalars, nested.
        key: where it is, as `section.key`.
    """
    if isinstance(value, Mapping):
        return {hide_in_text(str(k)): hide(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        flags = ("", *(str(v) for v in value))  # `--token X`, but not `--token=X`
        named = [f"{key}.{flag}" if re.fullmatch(r"--[\w.-]+", flag) else key for flag in flags]
        return [hide(v, name) for name, v in zip(named, value, strict=False)]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret_key(key):
        return HIDDEN
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """Hide secrets in a text: the values of environment variables that hold one, and what looks like one."""
    for name, value in os.environ.items():
        if len(value) >= _MIN_LENGTH and is_secret_key(name) and name not in _FOLDERS:
            text = text.replace(value, HIDDEN)
    return _SECRET.sub(lambda found: f"{found['before'] or ''}{HIDDEN}", text)


def command(launcher: int | None = None) -> str:
    """Return the command of this process, or of its launcher if there is one, without secrets.

    Args:
        launcher: process id.
    """
    arguments = sys.orig_argv
    if launcher is not None:
        with suppress(psutil.Error):  # it has ended
            arguments = psutil.Process(launcher).cmdline()
    if len(arguments) > 1 and Path(arguments[1]).name == "cohort":  # the interpreter of an installed script
        arguments = arguments[1:]
    return shlex.join(hide([Path(arguments[0]).name, *arguments[1:]]))


def commit() -> str | None:
    """Return the commit of the working directory, or None if it is not in a Git repository."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
