"""The process of a rollout worker: runs trajectories and sends their requests to servers, when the fleet says so.

`cohort.processes.child_start` starts it. See `cohort.processes.child` for how it talks to its parent, which decides by
`Fleet` which server a request goes to, and learns no tokens of it.
"""

import asyncio
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from cohort.errors import TrainingError, UserError, describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S, connect
from cohort.records import IntArray, ModelCall, RolloutGroup, Trajectory
from cohort.rollout.collector import RolloutCollector
from cohort.rollout.engines.base import CallKey, CallQueue, PendingCall, SamplingParams
from cohort.rollout.engines.servers.handles import (
    BusyError,
    Client,
    GenerateRequest,
    ServerError,
    answer_calls,
    requests_for,
)
from cohort.rollout.workers.packed_groups import write_group, write_message

ALIVE_EVERY_S = 10.0  # between messages of a worker that has nothing to say
_MAX_OPEN_FILES = 65_536
# Errors by their name in messages.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (BusyError, ServerError, UserError, TrainingError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCode:
    """What a worker runs."""

    # returns the tokenizer and the options of `RolloutCollector`; takes a function that shows a message to the user
    load: Callable[[Callable[[str], None]], tuple[Any, Mapping[str, Any]]]
    client: Callable[[], Client]  # of the servers
    max_num_seqs: int  # completions of a request


def main() -> None:
    """Run trajectories until the parent hangs up."""
    allow_open_files()
    connection = connect()
    ((path, content),) = connection.recv()
    sys.path += [folder for folder in path if folder not in sys.path]  # as where the code was found to be loadable
    Host(connection).run(content)


class Host:
    """Answers the parent's messages."""

    def __init__(self, connection: Connection):
        """Create a host; `run` starts it."""
        self._connection = connection
        self._sending = threading.Lock()
        self._sent_at = 0.0
        self._notes: list[str] = []
        self._release: Callable[[Trajectory], None] | None = None  # frees the environment of a trajectory
        self._unreleased: dict[tuple[int, int], Trajectory] = {}  # by group and index

    def run(self, content: bytes) -> None:
        """Load the code, a pickled `WorkerCode`, and run trajectories until the parent hangs up."""
        try:
            code: WorkerCode = pickle.loads(content)
            tokenizer, options = code.load(self._notes.append)
        except Exception as error:
            self._send(write_message({"failed": described(error)}))
            return
        self._send(write_message({}))  # from now on this process shows that it lives
        self._release = options.get("release")
        self._engine = LeasedEngine(max_num_seqs=code.max_num_seqs, send=self._send_all)
        self._collector = RolloutCollector(self._engine, tokenizer, while_waiting=self._show_life, **options)
        with closing(self._collector):
            hung_up = asyncio.Event()
            threading.Thread(target=self._read, args=(hung_up,), name="connection", daemon=True).start()
            serving = self._collector.start(self._engine.serve(code.client, hung_up))
            self._collector.wait([serving], count=1)

    def _read(self, hung_up: asyncio.Event) -> None:
        with suppress(OSError, EOFError):
            while True:
                self._collector.call_soon(self._on_messages, self._connection.recv())
        self._collector.call_soon(hung_up.set)
        time.sleep(2 * CLOSE_TIMEOUT_S)
        os._exit(0)  # and the guard kills what is left of the group

    def _on_messages(self, messages: Sequence[tuple[Any, ...]]) -> None:
        for kind, *arguments in messages:
            if kind == "group":
                number, content = arguments
                self._collector.start(self._sample(number, content))
            elif kind == "release":
                if self._release is not None and (trajectory := self._unreleased.pop(tuple(arguments), None)):
                    self._release(trajectory)
            else:
                getattr(self._engine, kind)(*arguments)

    async def _sample(self, number: int, content: bytes) -> None:
        """Sample a group from its pickled prompt, sampling parameters and key, and send it."""
        try:
            prompt, sampling, key = pickle.loads(content)
            group: RolloutGroup = await self._collector.own_group(prompt, sampling, key)
            is_held = self._release is not None
            message = write_group(number, group, is_held=is_held, counts=dict(self._collector.counts()))
            if is_held:
                self._unreleased |= {(number, index): t for index, t in enumerate(group.trajectories)}
        except Exception as error:
            message = write_message({"group": number, "error": described(error)})
        self._send(message)

    def _send_all(self, **messages: Sequence[Any]) -> None:
        """Send what there is to send."""
        notes, self._notes[:] = list(self._notes), []
        header = {kind: entries for kind, entries in {**messages, "notes": notes}.items() if entries}
        if header:
            self._send(write_message(header))

    def _show_life(self) -> None:
        if time.monotonic() - self._sent_at > ALIVE_EVERY_S:
            self._send(write_message({}))

    def _send(self, content: bytes) -> None:
        self._sent_at = time.monotonic()
        with self._sending, suppress(OSError):  # the parent has ended, and this process will
            self._connection.send_bytes(content)


class LeasedEngine:
    """The engine of a worker: announces its requests, and sends each to the server that the fleet leases to it."""

    def __init__(self, *, max_num_seqs: int, send: Callable[..., None]):
        """Create an engine.

        Args:
            max_num_seqs: completions of a request.
            send: sends lists of messages, by kind.
        """
        self._max_num_seqs = max_num_seqs
        self._send = send
        self._waiting = CallQueue()
        self._numbers = count()
        self._requests: dict[int, tuple[GenerateRequest, list[PendingCall]]] = {}  # unanswered
        self._attempts: dict[int, asyncio.Task[None]] = {}  # by lease
        self._completions: dict[int, list[ModelCall]] = {}  # of the last lease of a request
        self._outcomes: list[list[Any]] = []  # of leases, not sent

    async def serve(self, client: Callable[[], Client], hung_up: asyncio.Event) -> None:
        """Keep a client open until the parent hangs up."""
        async with client() as self._client:
            await hung_up.wait()

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        """Implement `RolloutEngine.generate`."""
        return await self._waiting.put(token_ids, sampling, key)

    def advance(self) -> bool:
        """Announce waiting calls, and say what became of leases."""
        announced = []
        for request, calls in requests_for(self._waiting.take(), max_num_seqs=self._max_num_seqs):
            number = next(self._numbers)
            self._requests[number] = request, calls
            announced.append(
                {
                    "number": number,
                    "prompt_id": request.prompt_id,
                    "num_completions": request.num_completions,
                    "num_tokens": request.num_tokens,
                    "max_completion_tokens": request.max_completion_tokens,
                    "urgent": request.urgent,
                }
            )
        outcomes, self._outcomes = self._outcomes, []
        self._send(requests=announced, outcomes=outcomes)
        return False

    def lease(self, lease: int, number: int, url: str) -> None:
        """Send a request to a server."""
        attempt = self._attempts[lease] = asyncio.create_task(self._attempt(lease, number, url))
        attempt.add_done_callback(lambda _: self._attempts.pop(lease))  # also of one that is cancelled before it starts

    def cancel(self, lease: int) -> None:
        """End an attempt, whose outcome no longer matters."""
        if lease in self._attempts:
            self._attempts[lease].cancel()

    def done(self, number: int, error: tuple[str, str] | None) -> None:
        """Answer the calls of a request, with an error or the completions of its last attempt."""
        _, calls = self._requests.pop(number)
        completions = self._completions.pop(number, [])
        answer_calls(calls, completions if error is None else as_error(error))

    def release_gpus(self) -> None:
        """Do nothing: this is for the parent."""

    def update_weights(self, *, policy_version: int) -> None:
        """Do nothing: this is for the parent."""

    def close(self) -> None:
        """Do nothing."""

    async def _attempt(self, lease: int, number: int, url: str) -> None:
        versions: set[int] = set()

        def note(version: int) -> bool:
            versions.add(version)
            return True  # the parent, which knows the current one, decides

        error = None
        try:
            self._completions[number] = await self._requests[number][0].send(self._client, url, allows=note)
        except Exception as raised:
            error = described(raised)
        self._outcomes.append([lease, sorted(versions), error])


def described(error: BaseException) -> tuple[str, str]:
    """Return an error as its name in `ERRORS`, or "", and its text."""
    name = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
    return name, str(error) if name else describe_error(error)


def as_error(described: Sequence[str]) -> Exception:
    """Return the error of a message; one of no known kind is a `TrainingError`."""
    name, text = described
    return ERRORS.get(name, TrainingError)(text)


def allow_open_files() -> None:
    """Raise the limit of open files as far as allowed: each request has a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
