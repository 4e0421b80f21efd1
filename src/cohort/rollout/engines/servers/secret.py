"""The secret that servers demand of every request, so that nobody else can replace their weights."""

import os
import re
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cohort.errors import UserError

SECRET_VARIABLE = (
    "COHORT_SECRET_FILE"  # environment variable: file from which a server reads the secret that it demands
)
_NUM_BYTES = 16  # of a new secret
_MAX_CHARACTERS = 4096
_KEY = "rollout.secret_file"
_WORD, _RULE = re.compile(r"[!-~]+"), "must hold one word of ASCII characters"


@dataclass(frozen=True, slots=True)
class Secret:
    """A bearer token. Its `repr` does not show it."""

    text: str = field(repr=False)  # printable ASCII without spaces
    mutual: bool = False  # a server must prove that it knows the secret, on every connection, before it gets requests

    @classmethod
    def new(cls) -> Self:
        """Return a random secret of 128 bits."""
        return cls(secrets.token_hex(_NUM_BYTES))


def request_headers(secret: Secret | None) -> dict[str, str]:
    """Return the headers of every request to a server; None for a server without a secret."""
    return {} if secret is None else {"Authorization": f"Bearer {secret.text}"}


def read_secret(file: str) -> Secret:
    """Read a secret file, `rollout.secret_file`.

    Raises:
        UserError: it cannot be read, other users can read it, or its content is not a secret.
    """
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            mode = os.fstat(stream.fileno()).st_mode & 0o777
            text = stream.read(_MAX_CHARACTERS).strip()
    except FileNotFoundError:
        raise UserError(
            f"{_KEY}: {file!r} does not exist; `cohort serve` creates it. If it runs on a machine with other files, "
            f"copy it from there"
        ) from None
    except OSError as error:
        raise UserError(f"{_KEY}: {file!r} cannot be read: {error.strerror}") from None
    if mode & 0o007:
        raise UserError(f"{_KEY}: {file!r} is open to all users (mode {mode:04o}); use `chmod 600`")
    if not _WORD.fullmatch(text):
        raise UserError(f"{_KEY}: {file!r} {_RULE}")
    return Secret(text)


def read_key(variable: str) -> Secret:
    """Read the secret from an environment variable, whose name is `rollout.api_key_env`.

    Raises:
        UserError: it is not set, or its content is not a secret.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        raise UserError(f"rollout.api_key_env: the environment variable {variable!r} is not set; export it")
    if not _WORD.fullmatch(text):
        raise UserError(f"rollout.api_key_env: the environment variable {variable!r} {_RULE}")
    return Secret(text)


def read_or_create_secret(file: str) -> Secret:
    """Read a secret file. If it is missing, create it with a new secret that only this user can read.

    Processes that do so at the same time get the same secret.

    Raises:
        UserError: it cannot be created, or as for `read_secret`.
    """
    path = Path(file)
    if not path.exists():
        try:
            descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
            try:
                with open(descriptor, "w", encoding="ascii") as stream:
                    stream.write(f"{Secret.new().text}\n")
                with suppress(FileExistsError):  # another process was first
                    os.link(partial, path)
            finally:
                os.unlink(partial)
        except OSError as error:
            raise UserError(f"{_KEY}: {file!r} cannot be created: {error.strerror}") from None
    return read_secret(file)
