"""Servers of a fleet: what they must be able to do, where they stand, and what they are asked."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from cohort.errors import UserError
from cohort.rollout.engines.servers.requests import GeneratedGroup, GenerateRequest, ServerError

T = TypeVar("T")


class ServerHandle(Protocol):
    """A server that can be started and ended, as often as need be. One call at a time, from any thread."""

    @property
    def url(self) -> str:
        """Where it listens; another address after another start."""
        ...

    def start(self) -> None:
        """Start it and return at once.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def poll(self) -> str | None:
        """None while it runs, else how it ended."""
        ...

    def log(self) -> str:
        """What it has written since its last start."""
        ...

    def stop(self) -> None:
        """End it, all its processes too."""
        ...


class RemoteServer:
    """A server that someone else runs: it can only be waited for."""

    def __init__(self, url: str):
        """Nothing is sent yet."""
        self.url = url

    def start(self) -> None:
        """Someone else does."""

    def poll(self) -> str | None:
        """Nobody here sees how it ends."""
        return None

    def log(self) -> str:
        """Its log is where it runs."""
        return ""

    def stop(self) -> None:
        """Someone else does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """What servers are given, and when they count as failed. Times in seconds."""

    max_num_seqs: int  # completions in flight on one server
    start_timeout_s: float
    request_timeout_s: float  # one that has no room for so long has failed; the client has the same for each request
    max_server_failures: int  # with no completion between; the first one is always too many where this is 0
    health_every_s: float = 1.0
    health_timeout_s: float = 60.0  # without any answer; a busy server answers late
    first_pause_s: float = 1.0  # before a server is started again; doubles with every failure
    longest_pause_s: float = 60.0

    def pause_s(self, num_failures: int) -> float:
        """After so many failures."""
        return min(self.first_pause_s * 2 ** (num_failures - 1), self.longest_pause_s)


class State(Enum):
    """Where a server stands."""

    STARTING = "starting"
    UP = "up"  # serving if it has the current weights, else behind
    FAILED = "failed"  # out of service until it is started again
    LOST = "lost"  # given up


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A server and where it stands. Only the fleet's event loop changes one."""

    index: int
    name: str  # in messages
    handle: ServerHandle
    failure: "asyncio.Future[ServerError]"  # of this start of it
    state: State = State.STARTING
    num_starts: int = 0
    num_failures: int = 0  # since its last completion
    last_end: str | None = None  # in which way it has ended, since its last completion
    num_rests: int = 0  # since its last completion: how often it had no room
    full_since: float = 0.0  # loop time of the first of them
    version: int | None = None  # of the policy that was published to it, in this start of it
    max_model_len: int = 0  # known once it is up
    num_in_flight: int = 0  # completions
    resting: bool = False  # it is left alone for a while
    publishing: bool = False  # weights are on their way to it, so it may not answer
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the calls of the handle that may take long

    def __str__(self) -> str:
        return f"{self.name} ({self.handle.url})" if self.handle.url else self.name

    @property
    def restartable(self) -> bool:
        """Whether it is this run's own."""
        return not isinstance(self.handle, RemoteServer)

    def why_too_long(self, request: GenerateRequest) -> UserError | None:
        """Why the request is over the server's limit, where it would shorten completions and not say so."""
        limit, num_prompt_tokens = self.max_model_len, len(request.token_ids)
        if request.total_tokens <= limit:
            return None
        room = limit - num_prompt_tokens
        advice = f"Use at most {room}" if room > 0 else "Leave such prompts out (rollout.max_prompt_tokens)"
        return UserError(
            f"rollout.max_completion_tokens: {request.sampling.max_completion_tokens} does not fit: prompt "
            f"{request.prompt_id} has {num_prompt_tokens} tokens, and {self} takes {limit} of prompt and completion. "
            f"{advice}, or servers with a larger max_model_len"
        )

    def fail(self, error: ServerError) -> None:
        """Take it out of service at once. What supervises it does the rest."""
        if self.state is State.UP:
            self.state = State.FAILED
            self.failure.set_result(error)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """The result of a call of the handle. One that has begun goes on when this is cancelled; the next one waits."""

        def alone() -> T:
            with self.lock:
                return call()

        return await asyncio.to_thread(alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that is up, as the thread of the loop sees it: one start of one server."""

    index: int
    num_starts: int
    url: str
    version: int | None  # of the policy that was published to it


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request of the fleet, and how often it was leased in vain."""

    number: int  # in the order of submission: what was lost goes before what has not been begun
    request: GenerateRequest
    result: Future[GeneratedGroup]
    urgent: bool  # goes before what is not
    only: RunningServer | None  # the one that must do it
    num_leases: int = 0

    def __lt__(self, other: "Job") -> bool:
        return (not self.urgent, self.number) < (not other.urgent, other.number)
