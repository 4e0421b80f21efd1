"""Server handles, and the state of a fleet's servers and requests."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from cohort.errors import UserError
from cohort.records import ModelCall
from cohort.rollout.engines.servers.requests import GenerateRequest, ServerError

T = TypeVar("T")


class ServerHandle(Protocol):
    """Starts and stops a server, repeatedly if needed. Calls may come from any thread, one at a time."""

    @property
    def url(self) -> str:
        """Address of the server; may change when it restarts."""
        ...

    def start(self) -> None:
        """Start the server without waiting for it.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def poll(self) -> str | None:
        """Return None while the server runs, else how it ended, such as "exited with code 1"."""
        ...

    def log(self) -> str:
        """Return the server's log since its last start."""
        ...

    def stop(self) -> None:
        """Stop the server and all of its processes."""
        ...


class RemoteServer:
    """A server that the run does not manage (`rollout.urls`)."""

    def __init__(self, url: str):
        """Store the address."""
        self.url = url

    def start(self) -> None:
        """Do nothing."""

    def poll(self) -> str | None:
        """Return None: the process is not visible here."""
        return None

    def log(self) -> str:
        """Return no log."""
        return ""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Load limit, timeouts (in seconds) and allowed failures of servers."""

    max_num_seqs: int  # completions in flight on one server
    start_timeout_s: float
    request_timeout_s: float  # per request; also how long a server may be busy
    max_server_failures: int  # consecutive, without a completion in between; 0 is like 1
    health_every_s: float = 1.0
    health_timeout_s: float = 60.0  # maximum time without an answer; a busy server answers late
    first_pause_s: float = 1.0  # before a restart; doubles with every failure
    longest_pause_s: float = 60.0

    def pause_s(self, num_failures: int) -> float:
        """Return the back-off after `num_failures` failures."""
        return min(self.first_pause_s * 2 ** (num_failures - 1), self.longest_pause_s)


class State(Enum):
    """State of a server."""

    STARTING = "starting"
    UP = "up"  # samples if it has the current weights
    FAILED = "failed"  # out of service until it restarts
    LOST = "lost"  # given up


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A server and its state, which only the fleet's event loop changes."""

    index: int
    name: str  # shown in messages
    handle: ServerHandle
    failure: "asyncio.Future[ServerError]"  # set when its current start fails
    state: State = State.STARTING
    num_starts: int = 0
    num_failures: int = 0  # since its last completion
    last_failure: str | None = None  # kind of the last failure since its last completion
    num_busy: int = 0  # busy answers since its last completion
    busy_since: float = 0.0  # event loop time of the first busy answer
    version: int | None = None  # policy version of its weights, since its last start
    max_model_len: int = 0  # known once it is up
    num_in_flight: int = 0  # completions
    backing_off: bool = False  # gets no requests for a while
    publishing: bool = False  # receiving weights, so it may not answer
    lock: threading.Lock = field(default_factory=threading.Lock)  # serializes calls of the handle

    def __str__(self) -> str:
        return f"{self.name} ({self.handle.url})" if self.handle.url else self.name

    @property
    def restartable(self) -> bool:
        """Whether this run manages the server."""
        return not isinstance(self.handle, RemoteServer)

    def length_error(self, request: GenerateRequest) -> UserError | None:
        """Return an error if the request exceeds `max_model_len`; the server would silently shorten completions."""
        limit, num_prompt_tokens = self.max_model_len, len(request.token_ids)
        if request.total_tokens <= limit:
            return None
        room = limit - num_prompt_tokens
        advice = f"use at most {room}" if room > 0 else "drop such prompts (rollout.max_prompt_tokens)"
        return UserError(
            f"rollout.max_completion_tokens: {request.sampling.max_completion_tokens} does not fit: a context of "
            f"prompt {request.prompt_id} has {num_prompt_tokens} tokens, and max_model_len of {self} is {limit}; "
            f"{advice}, or servers with a larger max_model_len"
        )

    def fail(self, error: ServerError) -> None:
        """Take the server out of service at once; its supervisor does the rest."""
        if self.state is State.UP:
            self.state = State.FAILED
            self.failure.set_result(error)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Call the handle in a thread. Once started, a call runs to its end, even if cancelled; the next one waits."""

        def alone() -> T:
            with self.lock:
                return call()

        return await asyncio.to_thread(alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """Snapshot of one start of a server that is up, for the training thread."""

    index: int
    num_starts: int
    url: str
    version: int | None  # policy version of its weights


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request in the fleet's queue."""

    number: int  # order of submission; requeued requests keep theirs
    request: GenerateRequest
    result: Future[list[ModelCall]]
    only: RunningServer | None  # the only server that may run it
    num_leases: int = 0

    def __lt__(self, other: "Job") -> bool:
        return (not self.request.urgent, self.number) < (not other.request.urgent, other.number)
