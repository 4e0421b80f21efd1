"""Who may read the page: the person with the printed address, from this machine, and no other website.

The server listens on 127.0.0.1 only. That alone protects from neither other users of the machine, nor from websites in
the user's browser that send requests to localhost, nor from names that resolve to 127.0.0.1 (DNS rebinding).
"""

import base64
import hashlib
import hmac
import html
import re
import secrets
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlencode

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL_HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE)
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>([^<]+)</script>")


def content_policy(page: bytes = b"") -> str:
    """Return the content policy of an HTML page: only its own files, and its inline scripts by their hashes."""
    digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(page)]
    hashes = [f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; script-src 'self'{''.join(hashes)}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS = [
    (b"content-security-policy", content_policy().encode()),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class Guard:
    """ASGI middleware that answers only requests with the cookie, which the token in the address is exchanged for."""

    def __init__(self, app: ASGIApp, *, token: str | None = None):
        """Guard `app` with a token, by default a new random one."""
        self.token = token or secrets.token_urlsafe(24)
        self._cookie = secrets.token_urlsafe(24)  # not the token: browsers send cookies to all ports of localhost
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message.get("headers", ())
                names = {name for name, _ in given}
                message = {**message, "headers": [*given, *((n, v) for n, v in _HEADERS if n not in names)]}
            await send(message)

        refusal = self._refuse(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        """Return the answer to a request that does not reach the app; None for others."""
        if scope["method"] not in ("GET", "HEAD"):
            refused = _error(scope, 405, f"{scope['method']} is not supported: the page only reads.")
            refused.headers["allow"] = "GET, HEAD"
            return refused
        host = _LOCAL_HOST.fullmatch(_only(scope, b"host"))
        if host is None:
            return _error(scope, 421, "The page answers to the host names localhost, 127.0.0.1 and [::1] only.")
        cookie = f"cohort-view-{host[1] or 80}"  # the browser's port, which may be that of an SSH tunnel
        if scope["path"] == "/" and (exchanged := self._exchange_token(scope, cookie)) is not None:
            return exchanged
        site = _only(scope, b"sec-fetch-site") or "none"
        from_page = site in ("same-origin", "none")
        if not any(_equal(value, self._cookie) for value in _cookies(scope, cookie)):
            if scope["path"] == "/" and not from_page:
                # A link on another site led here. Browsers leave out the cookie then, and send it on the next request.
                return HTMLResponse('<!doctype html><meta http-equiv="refresh" content="0;url=/">')
            return _error(scope, 403, "Open the address that `cohort view` printed: it has the token that lets you in.")
        if scope["path"] != "/" and not from_page:
            return _error(scope, 403, "Requests of other sites are refused.")
        return None

    def _exchange_token(self, scope: Scope, cookie: str) -> Response | None:
        """Answer an address with a token: set the cookie and remove the token from the address."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if not tokens:
            return None
        if len(tokens) > 1 or not _equal(tokens[0], self.token):
            return _error(
                scope, 403, "This token is not valid. It changes each time `cohort view` starts: open the new address."
            )
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        answer = RedirectResponse(f"/?{rest}" if rest else "/", status_code=303)
        answer.set_cookie(cookie, self._cookie, path="/", httponly=True, samesite="strict")
        return answer


def _equal(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


def _values(scope: Scope, name: bytes) -> Sequence[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _only(scope: Scope, name: bytes) -> str:
    """Return a header's value; "" if it is missing or repeated."""
    values = _values(scope, name)
    return values[0].strip() if len(values) == 1 else ""


def _cookies(scope: Scope, name: str) -> list[str]:
    """Return the values of a cookie. Other programs on localhost may set any others, in any format."""
    pairs = (pair.strip().partition("=") for header in _values(scope, b"cookie") for pair in header.split(";"))
    return [value for key, _, value in pairs if key == name]


def _error(scope: Scope, status: int, text: str) -> Response:
    if scope["path"].startswith(("/api/", "/events")):
        return JSONResponse({"error": text}, status)
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>Cohort</title><p>{html.escape(text)}</p>',
        status,
    )
