"""Connections of the endpoint: those that have not shown a key are few, and soon closed."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

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
