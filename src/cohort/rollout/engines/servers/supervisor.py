"""Keeps servers running: starts them, sees that they answer, and starts those that fail again."""

import asyncio
import re
from collections.abc import Callable

from cohort.rollout.engines.servers.handles import FleetLimits, Server, State
from cohort.rollout.engines.servers.requests import Client, ServerError

_LOG_LINES = 20
_FIRST_LOOK_S = 0.05  # at a server that starts or ends; at one that starts it doubles up to `health_every_s`


class Supervisor:
    """One task per server. For one event loop."""

    def __init__(
        self,
        client: Client,
        limits: FleetLimits,
        *,
        find_cause: Callable[[str], str | None],
        note: Callable[[str], None],
        on_up: Callable[[], None],
        on_down: Callable[[Server], None],
    ):
        """Start nothing yet.

        Args:
            client: asks whether a server is there.
            limits: of times and failures.
            find_cause: why a server ended, from its log; None where the log does not tell.
            note: told what a person should know.
            on_up: called when a server has come up.
            on_down: called with a server that has just failed.
        """
        self._client = client
        self._limits = limits
        self._find_cause = find_cause
        self._note = note
        self._on_up = on_up
        self._on_down = on_down
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def supervise(self, server: Server) -> str:
        """Start the server as often as need be. Returns once it is given up: how it ended, and its last words."""
        while True:
            try:
                await self._start(server)
                await self._watch(server)
            except ServerError as error:
                last_words = await self._end(server, error)
                if server.state is State.LOST:
                    return last_words
                again = "it is started again" if server.restartable else "it is tried again"
                pause_s = self._limits.pause_s(server.num_failures)
                self._note(f"{last_words}\n{again} in {pause_s:g} s, and its prompts are sampled anew")
                await asyncio.sleep(pause_s)

    async def _start(self, server: Server) -> None:
        """Until it answers.

        Raises:
            ServerError: it does not.
        """
        await self.may_start.wait()
        loop = asyncio.get_running_loop()
        server.state, server.failure = State.STARTING, loop.create_future()
        server.version, server.publishing, server.resting = None, False, False
        server.num_starts += 1
        server.num_rests = 0
        started, look_s = loop.time(), _FIRST_LOOK_S
        try:
            await server.in_thread(server.handle.start)
        except OSError as error:
            raise ServerError(f"{server} cannot be started: {error}") from error
        self._note(
            f"{server} is {'starting' if server.restartable else 'waited for'} (at most "
            f"{self._limits.start_timeout_s:g} s, rollout.start_timeout_s)"
        )
        while not await self._client.healthy(server.handle.url):
            _check_alive(server)
            if loop.time() - started > self._limits.start_timeout_s:
                limit = f"rollout.start_timeout_s: {self._limits.start_timeout_s:g}"
                raise _StartTimeoutError(f"{server} has not answered within {limit}")
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, self._limits.health_every_s)
        server.max_model_len = await self._client.max_model_len(server.handle.url)
        server.state = State.UP
        self._note(f"{server} answers after {loop.time() - started:.1f} s")
        self._on_up()

    async def _watch(self, server: Server) -> None:
        """Until it fails; never returns.

        Raises:
            ServerError: why it has failed.
        """
        loop, every_s = asyncio.get_running_loop(), self._limits.health_every_s
        last_answer = loop.time()
        while True:
            await asyncio.wait([server.failure], timeout=every_s)
            if server.failure.done():
                raise server.failure.result()
            _check_alive(server)
            # while it takes weights it need not answer; what sends them has a deadline of its own
            if server.publishing or await self._client.healthy(server.handle.url):
                last_answer = loop.time()
            elif loop.time() - last_answer > self._limits.health_timeout_s:
                raise ServerError(f"{server} has not answered for {self._limits.health_timeout_s:g} s")

    async def _end(self, server: Server, error: ServerError) -> str:
        """Takes a server out of service, for good if it has failed too often. How it ended, and its last words."""
        server.state = State.FAILED
        server.num_failures += 1
        self._on_down(server)
        words, way = await self._last_words(server, error)
        await server.in_thread(server.handle.stop)
        too_often = server.num_failures >= max(1, self._limits.max_server_failures)
        # one that ends in the same way twice would do so a third time; one that answers wrongly might not
        again = way is not None and way == server.last_end
        server.last_end = way
        if too_often or again or (isinstance(error, _StartTimeoutError) and not server.restartable):
            server.state = State.LOST
        return words

    async def _last_words(self, server: Server, error: ServerError) -> tuple[str, str | None]:
        """How a server failed, with the cause from its log or the log's last lines; and in which way it has ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.first_pause_s
        # a server that breaks off in the midst of an answer is about to end, and how says more
        while (ended := server.handle.poll()) is None and server.restartable and loop.time() < deadline:
            await asyncio.sleep(_FIRST_LOOK_S)
        how = str(error) if ended is None or ended in str(error) else f"{error} ({ended})"
        log = (await server.in_thread(server.handle.log)).rstrip()
        cause = self._find_cause(log) if ended is not None else None
        if cause:  # bytes, ids and addresses differ from one end to the next
            return f"{how}; the cause, from its log:\n{cause}", re.sub(r"\d+", "#", cause)
        last_lines = "\n".join(log.splitlines()[-_LOG_LINES:])
        way = "did not start" if isinstance(error, _StartTimeoutError) else ended
        if way and re.search("SIGKILL|SIGTERM", way):  # somebody else's doing
            way = None
        return f"{how}; the last lines of its log:\n{last_lines}" if log else how, way


class _StartTimeoutError(ServerError):
    """A server did not come up in time."""


def _check_alive(server: Server) -> None:
    ended = server.handle.poll()
    if ended is not None:
        raise ServerError(f"{server} has ended: {ended}")
