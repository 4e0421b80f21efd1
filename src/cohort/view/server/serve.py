"""Run the server: listen on 127.0.0.1, and stop at once on Ctrl-C or SIGTERM."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from cohort.errors import UserError
from cohort.view.server.app import build_app
from cohort.view.server.events import Watcher
from cohort.view.server.runs import Runs
from cohort.view.server.security import Guard

FIRST_PORT = 7600
_PORTS_TRIED = 50
_NICE = 10
_THREADS = 4  # requests answered at a time: the page must not slow the run down


class ViewServer(uvicorn.Server):
    """A server of the page, which is not started yet."""

    def __init__(self, folders: Sequence[Path], *, root: Path | None = None, port: int | None = None):
        """Listen for `folders`, and all runs below `root`. Raises as `listen` does."""
        self.listener = listen(port)
        self.port: int = self.listener.getsockname()[1]
        self.runs = Runs(folders, root=root)
        self.watcher = Watcher(self.runs)
        self._guard = Guard(build_app(self.watcher))
        super().__init__(
            uvicorn.Config(
                self._guard,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def address(self) -> str:
        """Address to open, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self._guard.token}"

    def stop_on_signals(self) -> None:
        """Have Ctrl-C and SIGTERM stop the server from now on, also before it serves. Only in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))

    def serve_until_stopped(self) -> None:
        """Serve in this thread until `should_exit` is set."""
        self.run(sockets=[self.listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests."""
        import anyio.to_thread

        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. Open tabs are not waited for."""
        self.watcher.stop()
        self.force_exit = True
        await super().shutdown(sockets)


def listen(port: int | None) -> socket.socket:
    """Listen on 127.0.0.1.

    Args:
        port: port; 0: any free one; None: the first free one from 7600.

    Raises:
        UserError: the port is taken, or none is free.
    """
    ports = range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED) if port is None else [port]
    for candidate in ports:
        # With the protocol given, asyncio turns Nagle's algorithm off; otherwise every answer takes 40 ms longer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if port is not None:
                raise UserError(
                    f"--port: {port} cannot be used: {error.strerror}; leave it out for the next free port"
                ) from error
            continue
        return listener
    raise UserError(f"--port: the ports {ports[0]} to {ports[-1]} are all in use; choose another one")


def lower_priority() -> None:
    """Let the run go first: this process gets the processor time that it leaves."""
    with suppress(OSError):
        os.nice(_NICE)
