"""Start servers, check their health, and restart those that fail."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from cohort.rollout.engines.servers.handles import Client, FleetLimits, Server, ServerError, State

_LOG_LINES = 20
_FIRST_POLL_S = 0.05  # interval of the first polls; doubles up to `health_every_s` while a server starts


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """Supervises servers, with one task per server. For one event loop."""

    client: Client
    limits: FleetLimits
    find_cause: Callable[[str], str | None]  # extracts why a server failed from its log; None if the log does not say
    failures_pause_starts: bool  # whether a failure clears `may_start`
    notify: Callable[[str], None]  # receives messages for the user
    on_up: Callable[[], None]  # called when a server has come up
    on_down: Callable[[Server], None]  # called with a server that just failed
    may_start: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        """Allow servers to start."""
        self.may_start.set()

    async def supervise(self, server: Server) -> str:
        """Run the server and restart it until it has failed too often. Returns a description of its last failure."""
        while True:
            try:
                await self._start(server)
                await self._watch(server)
            except ServerError as error:
                failure = await self._take_down(server, error)
                if server.state is State.LOST:
                    return failure
                action = "restarting" if server.restartable else "retrying"
                pause_s = self.limits.pause_s(server.num_failures)
                self.notify(f"{failure}\n{action} in {pause_s:g} s; its prompts will be resampled")
                await asyncio.sleep(pause_s)

    async def _start(self, server: Server) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: it failed to start.
        """
        await self.may_start.wait()
        loop = asyncio.get_running_loop()
        server.state, server.failure = State.STARTING, loop.create_future()
        server.version, server.publishing, server.backing_off = None, False, False
        server.num_starts += 1
        server.num_busy = 0
        started, poll_s = loop.time(), _FIRST_POLL_S
        try:
            await server.in_thread(server.handle.start)
        except OSError as error:
            raise ServerError(f"cannot start {server}: {error}") from error
        self.notify(
            f"{'starting' if server.restartable else 'waiting for'} {server} (at most "
            f"{self.limits.start_timeout_s:g} s, rollout.start_timeout_s)"
        )
        while not await self.client.healthy(server.handle.url):
            _check_alive(server)
            if loop.time() - started > self.limits.start_timeout_s:
                limit = f"rollout.start_timeout_s: {self.limits.start_timeout_s:g}"
                raise _StartTimeoutError(f"{server} has not answered within {limit}")
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, self.limits.health_every_s)
        server.max_model_len = await self.client.max_model_len(server.handle.url)
        server.state = State.UP
        self.notify(f"{server} is up after {loop.time() - started:.1f} s")
        self.on_up()

    async def _watch(self, server: Server) -> None:
        """Check the server's health until it fails; never returns.

        Raises:
            ServerError: why it failed.
        """
        loop, every_s = asyncio.get_running_loop(), self.limits.health_every_s
        last_answer = loop.time()
        while True:
            await asyncio.wait([server.failure], timeout=every_s)
            if server.failure.done():
                raise server.failure.result()
            _check_alive(server)
            # it may not answer while it receives weights; their sender has its own timeout
            if server.publishing or await self.client.healthy(server.handle.url):
                last_answer = loop.time()
            elif loop.time() - last_answer > self.limits.health_timeout_s:
                raise ServerError(f"{server} has not answered for {self.limits.health_timeout_s:g} s")

    async def _take_down(self, server: Server, error: ServerError) -> str:
        """Take a failed server out of service, permanently after too many failures. Returns a description."""
        server.state = State.FAILED
        server.num_failures += 1
        if self.failures_pause_starts:
            self.may_start.clear()
        self.on_down(server)
        failure, kind = await self._describe_failure(server, error)
        await server.in_thread(server.handle.stop)
        too_often = server.num_failures >= max(1, self.limits.max_server_failures)
        # the same cause twice would occur a third time; an invalid answer might not
        again = kind is not None and kind == server.last_failure
        server.last_failure = kind
        if too_often or again or (isinstance(error, _StartTimeoutError) and not server.restartable):
            server.state = State.LOST
        return failure

    async def _describe_failure(self, server: Server, error: ServerError) -> tuple[str, str | None]:
        """Describe a failure, with its cause or the last log lines; also return its kind, to compare failures."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.first_pause_s
        # a server that drops a connection is about to exit, and its exit status says more
        while (ended := server.handle.poll()) is None and server.restartable and loop.time() < deadline:
            await asyncio.sleep(_FIRST_POLL_S)
        how = str(error) if ended is None or ended in str(error) else f"{error} ({ended})"
        log = (await server.in_thread(server.handle.log)).rstrip()
        cause = self.find_cause(log) if ended is not None else None
        if cause:  # bytes, ids and addresses differ between failures
            return f"{how}; cause (from its log):\n{cause}", re.sub(r"\d+", "#", cause)
        last_lines = "\n".join(log.splitlines()[-_LOG_LINES:])
        kind = "did not start" if isinstance(error, _StartTimeoutError) else ended
        if kind and re.search("SIGKILL|SIGTERM", kind):  # killed from outside
            kind = None
        return f"{how}; last lines of its log:\n{last_lines}" if log else how, kind


class _StartTimeoutError(ServerError):
    """A server did not start in time."""


def _check_alive(server: Server) -> None:
    ended = server.handle.poll()
    if ended is not None:
        raise ServerError(f"{server} is down: {ended}")
