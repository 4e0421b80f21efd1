"""Answers: JSON and files, compressed if that saves time."""

import gzip
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from cohort.view.records import to_json

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
