"""The HTTP server of the endpoint, in a daemon thread with its own event loop.

Requests are read in that thread and answered in the event loop of their trajectory, which only runs while the training
loop waits for trajectories.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cohort.errors import UserError, describe_error
from cohort.rollout.endpoint.openai_answers import as_stream, error_answer, models_answer
from cohort.rollout.endpoint.openai_requests import (
    AnyRequest,
    ChatRequest,
    RequestError,
    TextRequest,
    TokenRequest,
    read_request,
)
from cohort.rollout.endpoint.session import Session, ended

MAX_WITHOUT_KEY = 128
KEY_TIMEOUT_S = 10.0
_FULL_TIMEOUT_S = 0.25  # for a key, while others wait: clients send it at once
_RETRY_S = 1.0  # after an error of `accept`, such as too many open files


class Server(uvicorn.Server):
    """A server that closes connections which do not show a key.

    Others wait in the system's queue while there are `MAX_WITHOUT_KEY`.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, *, has_key: Callable[[Scope], bool]):
        """Create the server; `run` starts it.

        Args:
            config: of uvicorn.
            listener: socket that listens; closed with the server.
            has_key: whether a request has the key of a session.
        """
        super().__init__(config)
        self._listener = listener
        self._has_key = has_key
        self._without_key: dict[_Connection, float] = {}  # when they were accepted, in order
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets=[])
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections and the listener."""
        if self._accepting is not None:
            self._accepting.cancel()
        await super().shutdown(sockets=[self._listener])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            await self._make_room()
            try:
                await loop.connect_accepted_socket(self._connection, accepted)
            except OSError:  # the client has gone
                accepted.close()

    async def _make_room(self) -> None:
        """Close the oldest connections without a key while there are too many."""
        while len(self._without_key) >= MAX_WITHOUT_KEY:
            oldest, since = next(iter(self._without_key.items()))
            await asyncio.sleep(max(0.0, since + _FULL_TIMEOUT_S - asyncio.get_running_loop().time()))
            if oldest in self._without_key:
                oldest.abort()

    def _connection(self) -> "_Connection":
        return _Connection(self, self._without_key, self._has_key)


class _Connection(H11Protocol):
    """A connection that is aborted unless it shows a key in time."""

    def __init__(self, server: Server, without_key: "dict[_Connection, float]", has_key: Callable[[Scope], bool]):
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._without_key = without_key
        self._has_key = has_key

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._without_key[self] = self.loop.time()
        self._deadline = self.loop.call_later(KEY_TIMEOUT_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._without_key and self.scope is not None and self._has_key(dict(self.scope)):
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._without_key.pop(self, None)
        self._deadline.cancel()


MAX_BODY_BYTES = 32 * 2**20
_CLOSE_TIMEOUT_S = 5.0
_KEEP_ALIVE_S = 600  # clients are idle during tools and training steps
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a server on all addresses


class Endpoint:
    """Serves the sessions of all trajectories, each under a key of its own."""

    def __init__(self, host: str):
        """Start serving on a free port of the address `host`. Raises as `listen` does."""
        listener = listen(host)
        reached_at = _ANY_ADDRESS.get(host, host)
        reached_at = f"[{reached_at}]" if ":" in reached_at else reached_at
        self.base_url = f"http://{reached_at}:{listener.getsockname()[1]}/v1"
        self._sessions: dict[str, Session] = {}
        self._num_unauthorized = 0
        self._num_refused = 0
        self._lock = threading.Lock()  # of the counts
        self._server = Server(
            uvicorn.Config(
                self._app(),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                workers=1,
            ),
            listener,
            has_key=lambda scope: _key(scope) in self._sessions,
        )
        self._server.force_exit = True  # at the end, wait neither for clients nor for requests
        self._thread = threading.Thread(target=self._server.run, name="endpoint", daemon=True)
        self._thread.start()

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """Serve a session within the context, and yield its key."""
        key = token_hex(16)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            session.close()

    def counts(self) -> dict[str, int]:
        """Return the number of requests with a wrong key and of other refused ones since the last call."""
        with self._lock:
            counts = {"unauthorized_requests": self._num_unauthorized, "refused_requests": self._num_refused}
            self._num_unauthorized = self._num_refused = 0
        return counts

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _app(self) -> ASGIApp:
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._post(ChatRequest), methods=["POST"]),
            Route("/v1/completions", self._post(TextRequest), methods=["POST"]),
            Route("/inference/v1/generate", self._post(TokenRequest), methods=["POST"]),
        ]
        handlers: Mapping[Any, Any] = dict.fromkeys((RequestError, HTTPException, Exception), self._error)
        app = Starlette(routes=routes, exception_handlers=handlers)

        async def authorized(scope: Scope, receive: Receive, send: Send) -> None:
            session = self._sessions.get(_key(scope))
            if session is None:
                request = Request(scope, receive)
                with suppress(ClientDisconnect):
                    await _read_body(request, max_bytes=0)  # a client that is still sending would not see the answer
                    response = await self._error(request, ended())
                    await response(scope, receive, send)
                return
            await app({**scope, "session": session}, receive, send)

        return authorized

    async def _models(self, request: Request) -> Response:
        return JSONResponse(models_answer())

    def _post(self, kind: type[AnyRequest]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            parsed = read_request(kind, await _read_json(request))
            answer = await _forward(request, parsed)
            if answer is None:
                return Response(status_code=499)  # nobody reads it
            if parsed.stream:
                stream = as_stream(answer, include_usage=parsed.stream_options.include_usage)
                return Response(stream, media_type="text/event-stream")
            return JSONResponse(answer)

        return handle

    async def _error(self, request: Request, raised: Exception) -> Response:
        error = _as_request_error(request, raised)
        with self._lock:
            self._num_unauthorized += error.status == 401
            self._num_refused += error.status != 401 and error.code != "trajectory_ended"
        return JSONResponse(error_answer(error), status_code=error.status)


def listen(host: str) -> socket.socket:
    """Listen on a free port of an address.

    Raises:
        UserError: this machine does not have the address.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise UserError(f"rollout.endpoint_host: {host!r}: cannot listen there: {error}") from error


async def _forward(request: Request, parsed: AnyRequest) -> dict[str, Any] | None:
    """Have the session answer in its own event loop. None: the client has hung up, and the call was cancelled."""
    session: Session = request.scope["session"]
    gone = asyncio.ensure_future(_hung_up(request))
    coroutine = session.answer(parsed, is_abandoned=gone.done)
    try:
        answered = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, session.loop))
    except RuntimeError:  # the run has ended, and closed the loop
        coroutine.close()
        gone.cancel()
        raise ended() from None
    waiting: list[asyncio.Future[Any]] = [answered, gone]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if answered.cancelled():
            raise ended()
        return answered.result() if answered.done() else None
    finally:
        answered.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_json(request: Request) -> Any:
    """Read the body of a request. Raises RequestError if it is too long or not JSON."""
    body = await _read_body(request)
    if body is None:
        raise RequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Read the body of a request. None: it is longer than `max_bytes`, and was dropped."""
    body = bytearray()
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            body += part
        elif num_bytes > 4 * MAX_BODY_BYTES:
            break
    return bytes(body) if num_bytes <= max_bytes else None


def _key(scope: Scope) -> str:
    """Return the key of a request; "" if it has none."""
    headers = {name.lower(): value for name, value in scope.get("headers", ())}
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _as_request_error(request: Request, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        supported = "/v1/chat/completions, /v1/completions, /v1/models and /inference/v1/generate"
        what = f"{request.method} {request.url.path}: {error.detail}; this endpoint has {supported}"
        return RequestError(what, status=error.status_code)
    return RequestError(describe_error(error), status=500)
