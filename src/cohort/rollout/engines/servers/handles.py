"""Requests to sampling servers, and the state of a fleet's servers."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, Self, TypeVar
from urllib.parse import urlsplit

import numpy as np

from cohort.errors import UserError
from cohort.records import IntArray, ModelCall
from cohort.rollout.engines.base import CallKey, PendingCall, SamplingParams


class ServerError(RuntimeError):
    """A request to a server failed. The message names the server, the endpoint and the response."""


class BusyError(ServerError):
    """The server accepts no more requests at the moment."""


class CallerEnded(Exception):  # noqa: N818
    """The process that waits for a request's completions has ended."""


class Request(Protocol):
    """A request for several completions of one context, as the fleet schedules it."""

    @property
    def prompt_id(self) -> int:
        """Row of the prompt, shown in messages."""
        ...

    @property
    def num_completions(self) -> int:
        """How many completions it asks for."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of context tokens."""
        ...

    @property
    def max_completion_tokens(self) -> int:
        """Maximum tokens of a completion."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether a step waits for it; training samples may be for later steps."""
        ...

    @property
    def node_names(self) -> frozenset[str]:
        """Host names and addresses of the node that sends it, whose servers are preferred; none without preference."""
        ...

    async def send(self, client: "Client", url: str, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Send it to a server once. Arguments and errors are those of `Client.generate`.

        Returns:
            The completions; none if another process has them.

        Raises:
            CallerEnded: nobody waits for the completions any more.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request whose completions this process gets."""

    prompt_id: int  # shown in messages
    token_ids: IntArray  # [K] the context
    num_completions: int
    sampling: SamplingParams
    seed: int  # completion i is sampled with seed + i
    urgent: bool  # a step waits for evaluation and parity checks; training samples may be for later steps

    @property
    def num_tokens(self) -> int:
        """Number of context tokens."""
        return len(self.token_ids)

    @property
    def max_completion_tokens(self) -> int:
        """Maximum tokens of a completion."""
        return self.sampling.max_completion_tokens

    @property
    def node_names(self) -> frozenset[str]:
        """Return an empty set: the fleet's own process prefers no server."""
        return frozenset()

    async def send(self, client: "Client", url: str, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Implement `Request.send`."""
        calls = await client.generate(url, self, allows=allows)
        if len(calls) != self.num_completions:
            raise ServerError(
                f"{url} sent an invalid answer for prompt {self.prompt_id}: {len(calls)} completions instead of "
                f"{self.num_completions}"
            )
        return calls


def requests_for(calls: Sequence[PendingCall], *, max_num_seqs: int) -> list[tuple[GenerateRequest, list[PendingCall]]]:
    """Batch calls into requests, and return each request with its calls.

    The calls of a request have the same context and sampling parameters and consecutive seeds, and are at most
    `max_num_seqs`. Greedy calls with the same context share a single completion.
    """
    joined: dict[object, list[PendingCall]] = {}
    for call in calls:
        group = None if call.sampling.temperature == 0 else replace(call.key, index=0)
        joined.setdefault((call.token_ids.tobytes(), call.sampling, group), []).append(call)
    return [request for same in joined.values() for request in _requests_of(same, max_num_seqs)]


def _requests_of(calls: Sequence[PendingCall], max_num_seqs: int) -> list[tuple[GenerateRequest, list[PendingCall]]]:
    """Return the requests for calls that differ only in their index."""
    first = calls[0]
    if first.sampling.temperature == 0:
        return [(_request(first, num_completions=1), list(calls))]
    parts: list[list[PendingCall]] = []
    for call in sorted(calls, key=lambda call: call.key.index):
        if parts and call.key.index == parts[-1][-1].key.index + 1 and len(parts[-1]) < max_num_seqs:
            parts[-1].append(call)
        else:
            parts.append([call])
    return [(_request(part[0], num_completions=len(part)), part) for part in parts]


def _request(first: PendingCall, *, num_completions: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_id=first.key.prompt_id,
        token_ids=first.token_ids,
        num_completions=num_completions,
        sampling=first.sampling,
        seed=call_seed(first.key, first.sampling),
        urgent=first.key.purpose != "train",
    )


def answer_calls(calls: Sequence[PendingCall], outcome: "list[ModelCall] | BaseException") -> None:
    """Answer the calls of a request with its completions, or its error."""
    if isinstance(outcome, BaseException):
        for call in calls:
            call.fail(outcome)
        return
    if calls[0].sampling.temperature == 0:  # one was requested, since all are equal
        outcome = outcome * len(calls)
    for call, result in zip(calls, outcome, strict=True):
        call.answer(result)


def call_seed(key: CallKey, sampling: SamplingParams) -> int:
    """Return the random seed of a call, below 2^63. The trajectories of a group have consecutive seeds.

    The first seed is a multiple of the smallest power of two that keeps prompts apart. A larger one would waste bits:
    generators on the CPU only use the lowest 32.
    """
    total, index = (1, 0) if sampling.temperature == 0 else (sampling.num_generations, key.index)
    assert index < total, key
    name = (*key.prompt_seed, *key.turn_seed)
    hashed = int(np.random.SeedSequence(name).generate_state(1, np.uint64)[0]) >> 1
    return hashed - hashed % (1 << (total - 1).bit_length()) + index


class Client(Protocol):
    """Requests completions from servers over their protocol. For one event loop."""

    async def __aenter__(self) -> Self:
        """Open the client."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """Close the client."""
        ...

    async def healthy(self, url: str) -> bool:
        """Whether the server answers and can sample."""
        ...

    async def max_model_len(self, url: str) -> int:
        """Return the server's maximum tokens of prompt and completion.

        Raises:
            ServerError: the server does not report it.
        """
        ...

    async def generate(self, url: str, request: GenerateRequest, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Sample the completions of a request and return them in order of their seeds.

        Args:
            url: address of the server.
            request: what to sample.
            allows: whether tokens of a policy version are acceptable; called when the answer arrives.

        Raises:
            ServerError: no answer, or an invalid one; a `BusyError` if the server has no room.
            UserError: the server rejects the request, and any other server would too.
        """
        ...


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
    def host(self) -> str | None:
        """Host name or address in the URL."""
        return urlsplit(self.handle.url).hostname

    @property
    def restartable(self) -> bool:
        """Whether this run manages the server."""
        return not isinstance(self.handle, RemoteServer)

    def length_error(self, request: Request) -> UserError | None:
        """Return an error if the request exceeds `max_model_len`; the server would silently shorten completions."""
        limit, num_prompt_tokens = self.max_model_len, request.num_tokens
        if num_prompt_tokens + request.max_completion_tokens <= limit:
            return None
        room = limit - num_prompt_tokens
        advice = f"use at most {room}" if room > 0 else "drop such prompts (rollout.max_prompt_tokens)"
        return UserError(
            f"rollout.max_completion_tokens: {request.max_completion_tokens} does not fit: a context of "
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
    request: Request
    result: Future[list[ModelCall]]
    only: RunningServer | None  # the only server that may run it
    num_leases: int = 0

    def __lt__(self, other: "Job") -> bool:
        return (not self.request.urgent, self.number) < (not other.request.urgent, other.number)
