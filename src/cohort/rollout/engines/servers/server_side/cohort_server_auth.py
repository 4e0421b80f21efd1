"""Middleware for a server's API (ASGI): reject requests without the secret of the run.

A server program's own API key may leave routes open that replace weights and pause the server. The file
$COHORT_SECRET_FILE, which may be a pipe, is read when the server imports this module: without a secret it does not
start. One route is open: there the server proves that it knows the secret, before a client sends it. Standard library
only, since the server's environment does not have Cohort.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from cohort_server_proof import PROOF_PATH, server_proof

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY = b'{"error": "this server demands the secret of its run"}'
_POLICY_VIOLATION = 1008  # close code of WebSockets


def _read_secret() -> bytes:
    with open(os.environ["COHORT_SECRET_FILE"], "rb") as file:
        secret = file.readline().strip()  # not to the end: another process may hold the pipe open
    if not secret:
        raise ValueError("$COHORT_SECRET_FILE holds no secret")
    return secret


_SECRET = _read_secret()
_EXPECTED = b"Bearer " + _SECRET


class RequireSecret:
    """ASGI middleware that demands `Authorization: Bearer SECRET` on every route, also of WebSockets."""

    def __init__(self, app: App):
        """Wrap an application."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has the secret, and the server's own lifespan events."""
        if scope["type"] == "lifespan" or _is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        elif scope["path"] == PROOF_PATH:
            await answer(send, 200, _proof(scope), b"text/plain")
        else:
            await answer(send, 401, _BODY, b"application/json", (b"www-authenticate", b"Bearer"))


async def answer(send: Send, status: int, body: bytes, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Answer a request with a body of a media type."""
    headers = ((b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


def _proof(scope: Scope) -> bytes:
    """Return the proof for the request's nonce; "" without one, or without a port."""
    (nonce,) = parse_qs(scope["query_string"]).get(b"nonce", [b""])[:1]
    port = (scope.get("server") or ("", None))[1]  # of the connection's own socket
    return server_proof(_SECRET, nonce, port) if nonce and port else b""


def _is_authorized(scope: Scope) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], _EXPECTED)
