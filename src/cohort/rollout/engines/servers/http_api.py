"""HTTP requests to servers with the secret of the run: to control them, and for completions.

Stateless and without retries. On each new connection a server first proves who it is, if the secret is mutual.
"""

import asyncio
import os
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Self

import httpx2

from cohort import fast_json
from cohort.errors import UserError
from cohort.rollout.engines.servers.handles import BusyError, ServerError
from cohort.rollout.engines.servers.secret import Secret, request_headers
from cohort.rollout.engines.servers.server_proof import CONNECTED, check_server, check_server_async

QUICK_TIMEOUT_S = 10.0  # for endpoints that answer at once
_CONNECT_TIMEOUT_S = 60.0  # an event loop that starts thousands of requests notices connections late
_REJECTED = (400, 413, 422)
_BUSY = (429, 503)
_UNAUTHORIZED = (401, 403)
_NOT_FOUND = 404
_JSON = {"Content-Type": "application/json"}
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # in OpenSSL's messages


class ServerApi:
    """The control endpoints of one server: base class of clients with a method per endpoint. Thread-safe."""

    def __init__(self, url: str, *, secret: Secret | None, timeout_s: float | None):
        """Create a client without connecting.

        Args:
            url: address of the server, such as http://127.0.0.1:8000.
            secret: sent with every request, after the server's proof if it is mutual; None for a server without one.
            timeout_s: maximum time per call; None to wait until the server exits or `close` is called.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._secret = secret
        self._client = httpx2.Client(base_url=self.url, timeout=timeout_s, **_client_options(self.url, secret))
        self._sockets: set[socket.socket] = set()  # sockets of calls in progress
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections. Calls in progress in other threads fail at once."""
        with self._lock:
            self._closed = True
            for one in self._sockets:
                _shut_down(one)
        self._client.close()

    def _request(self, method: str, endpoint: str, **request: Any) -> Any:
        """Send a request and return the answer, parsed if it is JSON, else as text.

        Raises:
            ServerError: no answer in time, an error, or a process that is not the run's server.
        """
        try:
            with self._track_sockets() as trace:
                response = self._client.request(method, endpoint, extensions={"trace": trace}, **request)
        except httpx2.TimeoutException as error:
            raise self._error(endpoint, f"no answer within {self.timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise self._error(endpoint, f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            what = f"HTTP {response.status_code}: {_error_text(response)}"
            if response.status_code == _NOT_FOUND:
                what += "; start the server with `cohort serve`, or as `cohort serve --print-only` says"
            raise self._error(endpoint, what)
        try:
            return response.json()
        except ValueError:
            return response.text

    @contextmanager
    def _track_sockets(self) -> Iterator[Callable[[str, Any], None]]:
        """Yield a trace callback that registers a call's sockets, so that `close` can end it, and asks for proofs.

        Closing a socket does not wake a thread that reads from it; shutting it down does.
        """
        mine: list[socket.socket] = []

        def trace(event: str, info: Any) -> None:
            if event in (CONNECTED, "connection.start_tls.complete"):
                mine.append(info["return_value"].get_extra_info("socket"))
                with self._lock:
                    self._sockets.add(mine[-1])
                    if self._closed:
                        _shut_down(mine[-1])
            if event == CONNECTED and self._secret is not None and self._secret.mutual:
                check_server(info["return_value"], self.url, self._secret, timeout_s=self.timeout_s)

        try:
            yield trace
        finally:
            with self._lock:
                self._sockets.difference_update(mine)

    def _field(self, endpoint: str, answer: Any, name: str, kind: type) -> Any:
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise self._error(endpoint, f"no {name} in the answer {str(answer)[:200]!r}")
        return value

    def _error(self, endpoint: str, what: str) -> ServerError:
        return ServerError(f"{self.url}{endpoint}: {what}")


class HttpClient:
    """Base class of a `Client` over HTTP. For one event loop."""

    def __init__(self, *, secret: Secret | None, timeout_s: float):
        """Create a client; connections are opened per request.

        Args:
            secret: sent with every request, after the server's proof if it is mutual; None for servers without one.
            timeout_s: maximum time per request.
        """
        self._secret = secret
        self._timeout_s = timeout_s
        # Those without a request, by the trusted certificates. What one client does for each of many requests at once
        # grows with their number.
        self._idle: defaultdict[ssl.SSLContext, list[httpx2.AsyncClient]] = defaultdict(list)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for http in [http for idle in self._idle.values() for http in idle]:
            await http.aclose()

    async def healthy(self, url: str) -> bool:
        """Whether `/health` of the server answers with success.

        Raises:
            ServerError: it demands another secret, is not the run's server, or has a certificate that is not trusted.
        """
        try:
            async with asyncio.timeout(QUICK_TIMEOUT_S):
                response = await self._send(url, "GET", "/health")
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
            if _UNTRUSTED in str(error):
                raise ServerError(
                    f"{url}: {error}; for an authority of your own, set SSL_CERT_FILE to the file with its certificate"
                ) from error
            return False
        _check_secret(response)
        return response.status_code == 200

    @contextmanager
    def _client(self, url: str) -> Iterator[httpx2.AsyncClient]:
        """Lend a client for one request."""
        options = _client_options(url, self._secret)
        idle = self._idle[options["verify"]]
        timeout = httpx2.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S)
        http = idle.pop() if idle else httpx2.AsyncClient(timeout=timeout, **options)
        try:
            yield http
        finally:
            idle.append(http)

    async def _send(self, url: str, method: str, path: str, *, json: Any = None) -> httpx2.Response:
        """Send a request on a new connection, once the server has proved who it is if the secret is mutual."""
        secret = self._secret

        async def trace(event: str, info: Any) -> None:
            if event == CONNECTED and secret is not None:
                await check_server_async(info["return_value"], url, secret)

        # a request has about ten events, and each costs a call
        extensions = {"trace": trace} if secret is not None and secret.mutual else None
        body: dict[str, Any] = {} if json is None else {"content": fast_json.encode(json), "headers": _JSON}
        with self._client(url) as http:
            return await http.request(method, f"{url}{path}", **body, extensions=extensions)

    async def _request(self, url: str, method: str, path: str, *, timeout_s: float, json: Any = None) -> Any:
        """Send a request and return the parsed body of its answer.

        Raises:
            RejectedError: the server rejects it.
            ServerError: no answer in time, or an error; a `BusyError` if the server has no room.
        """
        try:
            async with asyncio.timeout(timeout_s):  # for the whole answer, however slowly it arrives
                response = await self._send(url, method, path, json=json)
        except TimeoutError as error:
            raise ServerError(f"{url}{path}: no answer within {timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerError(f"{url}{path}: {type(error).__name__}: {error}") from error
        _check_secret(response)
        if response.status_code != 200:
            said = f"{response.status_code} {' '.join(response.text.split()):.300}"
            if response.status_code in _REJECTED:
                raise RejectedError(said)
            raise (BusyError if response.status_code in _BUSY else ServerError)(f"{url}{path}: {said}")
        try:
            return fast_json.decode(response.content)
        except ValueError as error:
            raise ServerError(f"{url}{path} sent an answer that is not JSON: {response.content[:80]!r}") from error


def _client_options(url: str, secret: Secret | None) -> dict[str, Any]:
    """Return the options of a client, which opens a connection per request.

    Servers close idle connections after some seconds, and all after some errors; a request on such a connection would
    look like a crashed server. They are on the local network, so proxies from the environment are ignored.

    Raises:
        UserError: SSL_CERT_FILE cannot be read.
    """
    return {
        "headers": request_headers(secret),
        "verify": trusted_certificates() if url.startswith("https:") else _trusting_nobody(),
        "trust_env": False,
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=0),
    }


def trusted_certificates() -> ssl.SSLContext:
    """Return the certificates of authorities in the file SSL_CERT_FILE, by default certifi's.

    Raises:
        UserError: the file cannot be read.
    """
    return _load_certificates(os.environ.get("SSL_CERT_FILE"))


@cache  # takes longer than most calls
def _load_certificates(file: str | None) -> ssl.SSLContext:
    if file is None:
        return httpx2.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # or an ssl.SSLError
        raise UserError(f"SSL_CERT_FILE: {file!r} holds no certificates that can be read: {error}") from error


@cache
def _trusting_nobody() -> ssl.SSLContext:
    """Return what clients without TLS are given, since each would else make its own, which takes longest."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _check_secret(response: httpx2.Response) -> None:
    if response.status_code in _UNAUTHORIZED:
        raise ServerError(
            f"{response.url}: the server demands another secret (HTTP {response.status_code}); rollout.secret_file "
            f"must be the file with which it was started, or rollout.api_key_env a variable with its key"
        )


class RejectedError(Exception):
    """The server rejected a request as invalid."""


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):  # already closed, or replaced by a TLS socket
        one.shutdown(socket.SHUT_RDWR)


def _error_text(response: httpx2.Response) -> str:
    """Return the first line of an error, without its JSON wrapping."""
    try:
        said = response.json()
        while isinstance(said, dict):
            said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    except ValueError:
        said = response.text
    lines = str(said).strip().splitlines()
    return lines[0][:500] if lines else "no explanation"
