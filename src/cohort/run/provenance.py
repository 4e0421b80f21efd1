"""Where a run comes from: its command and commit without secrets, and the versions of packages.

Redaction hides too much rather than too little: a value shown as `***` costs a look into the file.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    return f"{_SHOWN.get(name, name)} {version} is newer than {newest}, which Cohort was tested with"


def untested_versions() -> list[str]:
    """Describe what this process has loaded in a version newer than any that was tested. Servers are not in it."""
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


HIDDEN = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words(
    "password passwords passwd passphrase pwd pw pass dsn secret secrets credential credentials auth authorization "
    "authentication header headers cookie cookies bearer jwt signature sig apikey apikeys accesskey secretkey "
    "privatekey authtoken accesstoken hftoken"
)
_RUN_TOGETHER = re.compile(r"passw(or)?d|passphrase|passcode|secret|credential|apikey|accesskey")  # PGPASSWORD
_SOMETIMES = frozenset({"key", "token", "keys", "tokens"})  # secret as the last word, plurals only with an owner
_OWNERS = _words(
    "access api app auth aws azure bearer bot client deploy github gitlab hf hub huggingface id jwt openai "
    "personal private refresh secret security service session ssh wandb"
)
_HARMLESS_LAST = _words(  # `api_key_env` names a variable, `secret_file` a file
    "env file path dir id ids name column type length len count limit size ratio index budget mask"
)
_HARMLESS_FIRST = _words(  # `eos_token`, `answer_key`
    "bos eos pad unk sep cls mask stop end start special image think max min num prompt answer question sort "
    "group primary foreign column row"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_KNOWN_TOKEN = re.compile(
    r"\b(sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|nvapi-[\w-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
)
# user and password of an address; a password may hold a slash if what looks like a port is none
_PASSWORD = re.compile(r"(?<=://)(?:[^\s/?#'\"]*|[^\s/?#'\"@]*:(?!\d*(?:[\s/?#'\"]|$))[^\s'\"]*)@")
_PARAMETER = re.compile(r"([?&;#]([\w.%-]{1,200})=)([^&;#\s'\"]+)")
_BEARER = re.compile(r"\b(bearer|basic|digest)(\s+)[\w.~+/=:-]{6,}", re.IGNORECASE)
_USER = re.compile(r"((?<!\S)(?:-u|--user)\s+[^\s:]+:)\S+")  # of curl
_NAME = re.compile(r"(?<![\w.-])-{0,2}(?P<name>[A-Za-z_][\w.-]{0,200})\\?[\"']?\s*[=:]\s*")
_FLAG = re.compile(r"(?<![^\s'\"])--?(?P<name>[A-Za-z][\w.-]{0,200})\s+(?!-)")
_VALUE = re.compile(
    r"(?:(?:bearer|basic|digest|token)\s+)?(?:\\\".*?\\\"|\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s'\"]+['\"]?|['\"]\S*)",
    re.IGNORECASE | re.DOTALL,
)
_LINE = re.compile(r"[{\[][^\n]*|[^\n'\"]+|\"[^\"]*\"|'[^']*'")  # of headers, whose values have spaces
_UP_TO_QUOTE = {quote: re.compile(f"[^{quote}]+") for quote in ("'", '"')}


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret, such as `api_key`, `HF_TOKEN` or `headers.X-Own`; not `api_key_env`."""
    return any(_names_secret(part) for part in re.split(r"[./]", key))


def hide(value: Any, key: str = "") -> Any:
    """Hide the secrets in a value as read from JSON or YAML. Its shape stays.

    Args:
        value: mappings, lists and scalars, nested.
        key: where it is, as `section.key`.
    """
    if isinstance(value, Mapping):
        key = re.sub(r"(^|\.)tokens$", r"\1token", key)  # by user or service; a number of tokens is no mapping
        named = next((value[k] for k in ("name", "key") if isinstance(value.get(k), str) and "value" in value), "")
        return {
            hide_in_text(str(k)): hide(v, f"{key}.{named}.{k}" if k == "value" else f"{key}.{k}")
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        flags = ["", *value]
        return [hide(v, f"{key}.{flag}" if _is_flag(flag) else key) for flag, v in zip(flags, value, strict=False)]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret_key(key):
        return HIDDEN
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """Hide secrets in a text: in addresses, after `key=`, `key:` and `--key`, and tokens of well-known services."""
    text = _KNOWN_TOKEN.sub(HIDDEN, text)
    text = _PASSWORD.sub(f"{HIDDEN}@", text)
    text = _USER.sub(rf"\1{HIDDEN}", text)
    text = _PARAMETER.sub(lambda m: f"{m[1]}{HIDDEN if is_secret_key(m[2]) or m[2] == 'code' else m[3]}", text)
    text = _hide_after(_FLAG, _hide_after(_NAME, text))
    return _BEARER.sub(rf"\1\2{HIDDEN}", text)


def hide_in_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide secrets in the arguments of a command: `key=SECRET`, `--key=SECRET`, `--key SECRET` and addresses."""
    hidden: list[str] = []
    for flag, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        if _is_flag(flag) and is_secret_key(flag):
            hidden.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w.-]+", name) and is_secret_key(name):
            hidden.append(f"{name}={HIDDEN}")
        else:
            hidden.append(hide_in_text(argument))
    return hidden


def _names_secret(part: str) -> bool:
    words = [word.lower() for word in _WORD.findall(part)]
    if len(words) > 1 and words[-1] == "id" and words[-2] in ("key", "token"):  # `ACCESS_KEY_ID`, not `eos_token_id`
        return words[0] not in _HARMLESS_FIRST
    if not words or words[-1] in _HARMLESS_LAST:
        return False
    if not _SECRET_WORDS.isdisjoint(words) or _RUN_TOGETHER.search("".join(words)):
        return True
    found = [n for n, word in enumerate(words) if word in _SOMETIMES]
    if any(words[n - 1] in _OWNERS for n in found if n):
        return True
    return words[-1] in ("key", "token") and words[0] not in _HARMLESS_FIRST


def _is_flag(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith("-") and "=" not in argument


def _hide_after(pattern: re.Pattern[str], text: str) -> str:
    """Hide the values that follow names of secrets."""
    parts, end = [], 0
    for found in pattern.finditer(text):
        if found.start() < end or not is_secret_key(found["name"]) or text.startswith(HIDDEN, found.end()):
            continue
        value = _value_pattern(found).match(text, found.end())
        if value is not None:
            parts += [text[end : found.end()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])


def _value_pattern(name: re.Match[str]) -> re.Pattern[str]:
    """Return the pattern of the value after a name: how far it reaches depends on what is around the name."""
    before = name.string[name.start() - 1 : name.start()]
    if before in ("'", '"') and before not in name[0]:  # '--password=two words'
        return _UP_TO_QUOTE[before]
    return _LINE if re.search("header|cookie", name["name"], re.IGNORECASE) else _VALUE


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
    return shlex.join(hide_in_arguments([Path(arguments[0]).name, *arguments[1:]]))


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
