"""Queries and answers: parse query strings, send JSON and files, compressed if that saves time."""

import gzip
import hashlib
import mimetypes
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from cohort_view.server.security import content_policy
from cohort_view.values import to_json

_COMPRESS_FROM_BYTES = 2000


def json_answer(request: Request, value: object) -> Response:
    """Answer with a record as JSON."""
    return compressed(request, to_json(value).encode(), media_type="application/json")


def json_error(status: int, text: str) -> Response:
    """Answer with a sentence on what is wrong."""
    return Response(to_json({"error": text}), status, media_type="application/json")


def compressed(
    request: Request, content: bytes, *, media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with `content`, compressed if it is large and the browser reads that."""
    answer_headers = {**(headers or {}), "vary": "accept-encoding"}
    if len(content) >= _COMPRESS_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, compresslevel=1)
        answer_headers["content-encoding"] = "gzip"
    return Response(content, headers=answer_headers, media_type=media_type)


_MAX_NAMES = 2000


class BadQueryError(ValueError):
    """A value of a query string is invalid. The message names the field, the value and the rule."""


class QueryParameters:
    """The values of one query string. Methods raise BadQueryError."""

    def __init__(self, params: QueryParams):
        self._params = params

    def text(self, name: str, default: str = "") -> str:
        """Return a value as it is."""
        return self._params.get(name, default)

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        given = self._params.get(name, "")
        if not given:
            return default
        if not (given.isascii() and given.isdecimal() and len(given) <= 15 and low <= int(given) <= high):
            raise BadQueryError(f"{name}: {given!r} is not a whole number from {low} to {high}")
        return int(given)

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, or None if it is not given."""
        given = self._params.get(name, "")
        if not given:
            return None
        try:
            value = float(given)
        except ValueError:
            value = float("nan")
        if not abs(value) < float("inf"):
            raise BadQueryError(f"{name}: {given!r} is not a number")
        return value

    def choice(self, name: str, default: str, allowed: Collection[str]) -> str:
        """Return one of the allowed values."""
        value = self._params.get(name) or default
        if value not in allowed:
            raise BadQueryError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
        return value

    def names(self, name: str) -> list[str]:
        """Return values, repeated or separated by commas. A comma within a value is written as %2C."""
        found = [unquote(part) for value in self._params.getlist(name) for part in value.split(",") if part]
        if len(found) > _MAX_NAMES:
            raise BadQueryError(f"{name}: {len(found)} names are given; at most {_MAX_NAMES} work")
        return list(dict.fromkeys(found))


STATIC = Path(__file__).parent.parent / "static"
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class StaticFiles:
    """Serves the packaged files."""

    def __init__(self, folder: Path = STATIC):
        """Find the files of `folder`."""
        self._files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    def answer(self, request: Request, name: str) -> Response:
        """Answer with the file `name`, or with 304 if the browser has it."""
        path = self._files.get(name)
        if path is None:
            return Response("This file does not exist.\n", 404, media_type="text/plain")
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if path.suffix == ".html":
            headers["content-security-policy"] = content_policy(content)
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return compressed(request, content, media_type=media_type, headers=headers)
