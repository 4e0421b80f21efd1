"""Schedule requests over a run's servers, in a thread of its own.

Each request is leased to one server, with a timeout. Whatever happens to that server, the request is answered exactly
once, or returns to the queue.
"""

import asyncio
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any, TypeVar

from cohort.errors import TrainingError, UserError
from cohort.records import ModelCall
from cohort.rollout.engines.servers.handles import (
    BusyError,
    CallerEnded,
    Client,
    FleetLimits,
    Job,
    Request,
    RunningServer,
    Server,
    ServerError,
    ServerHandle,
    State,
)
from cohort.rollout.engines.servers.supervisor import Supervisor

T = TypeVar("T")

# If this many servers fail at one request, the request is the likely cause.
_MAX_LEASES = 10
_NEAR_LOAD = 2  # how many times the completions of the emptiest server one on the same node may have
_CALL_TIMEOUT_S = 60.0  # maximum time for a quick call in the fleet's thread
_CLOSE_TIMEOUT_S = 60.0
_CLOSED = "the rollout engine was closed before this was sampled"


@dataclass(eq=False)
class Fleet:
    """Leases requests to servers and keeps the servers running.

    Call it from the training thread, except what says that it takes any.
    """

    handles: Sequence[ServerHandle]  # of the servers
    client: Callable[[], Client]  # creates the client; called in the fleet's thread
    limits: FleetLimits  # timeouts and allowed failures
    _: KW_ONLY
    server_name: str  # what messages call a server, such as "vLLM server"
    find_cause: Callable[[str], str | None] = lambda log: None  # why a server failed, from its log; None if unknown
    failures_pause_starts: bool = False  # whether a failed server restarts only after `pause_starts(False)`

    def __post_init__(self) -> None:
        """Start the servers without waiting for them."""
        self._servers: list[Server] = []
        self._queue: list[Job] = []  # sorted
        self._unfinished: set[Job] = set()
        self._leases: dict[asyncio.Task[list[ModelCall]], tuple[Server, Job]] = {}
        self._numbers = count()
        self._target: int | None = None  # policy version that a server must have to get requests
        self._notes: deque[str] = deque()
        self._fatal: TrainingError | None = None
        self.on_change: Callable[[], None] = lambda: None  # called in the fleet's thread when a server's state changes
        self._changed = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()
        if not self._started.wait(_CALL_TIMEOUT_S):
            raise TrainingError(
                f"the thread that manages the {self.server_name}s did not start within {_CALL_TIMEOUT_S:g} s"
            )
        self.check()

    # Called from the training thread.

    def check(self) -> None:
        """Raise `TrainingError` if the fleet has failed."""
        if self._fatal:
            raise self._fatal

    def notes(self) -> Iterator[str]:
        """Yield new messages for the user."""
        while self._notes:
            yield self._notes.popleft()

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something has changed since the last call, at most `timeout_s`."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def submit(
        self,
        requests: Iterable[tuple[Request, Future[list[ModelCall]]]],
        *,
        only: RunningServer | None = None,
    ) -> None:
        """Queue requests, from any thread. The fleet's thread sets each future to the completions or an error.

        Args:
            requests: requests with their futures; the first ones are sent first.
            only: run on this server only; if it fails, the futures get its `ServerError`.
        """
        self.check()
        jobs = [Job(number=next(self._numbers), request=r, result=f, only=only) for r, f in requests]

        def enqueue() -> None:
            self._unfinished.update(jobs)
            for job in jobs:
                insort(self._queue, job)
            self._dispatch()

        self._call(enqueue)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function in the fleet's event loop, from any thread. Does nothing once the fleet is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def notify(self, text: str) -> None:
        """Show a message to the user, from any thread."""
        self._notes.append(text)
        self._signal_change()

    def num_unfinished(self) -> int:
        """Return the number of requests without a result."""
        return len(self._unfinished)

    def running(self) -> list[RunningServer]:
        """Return the servers that are up."""
        return self._call(
            lambda: [
                RunningServer(index=s.index, num_starts=s.num_starts, url=s.handle.url, version=s.version)
                for s in self._servers
                if s.state is State.UP
            ]
        )

    def num_starting(self, *, first_time: bool = False) -> int:
        """Return the number of servers that are starting, or only of those in their first start."""
        return self._call(
            lambda: sum(s.state is State.STARTING and (s.num_starts <= 1 or not first_time) for s in self._servers)
        )

    def set_policy_version(self, version: int) -> None:
        """Send requests only to servers with this policy version."""

        def change() -> None:
            self._target = version
            self._dispatch()

        self._call(change)

    @contextmanager
    def publishing(self, servers: Iterable[RunningServer]) -> Iterator[None]:
        """Skip health checks of servers while they receive weights."""

        def mark(publishing: bool) -> None:
            for server in filter(None, map(self._same_start, servers)):
                server.publishing = publishing

        self._call(lambda: mark(True))
        try:
            yield
        finally:
            self._call(lambda: mark(False))

    def set_version(self, server: RunningServer, version: int | None) -> None:
        """Record the policy version of a server's weights; None if it has none."""

        def change() -> None:
            if same := self._same_start(server):
                same.version = version
            self._dispatch()

        self._call(change)

    def fail(self, server: RunningServer, error: ServerError) -> None:
        """Mark a server as failed. It is restarted, and its requests go to other servers."""

        def change() -> None:
            if same := self._same_start(server):
                same.fail(error)

        self._call(change)

    def pause_starts(self, hold: bool) -> None:
        """Pause or resume server starts."""
        self._call(self._supervisor.may_start.clear if hold else self._supervisor.may_start.set)

    def starts_paused(self) -> bool:
        """Whether servers wait for `pause_starts(False)` before they start."""
        return self._call(lambda: not self._supervisor.may_start.is_set())

    def close(self) -> None:
        """Stop the servers of this run. Unfinished requests fail with a `TrainingError`."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._abort(TrainingError(_CLOSED))  # if the thread hangs

    def _call(self, function: Callable[[], T]) -> T:
        """Run a quick function in the fleet's thread and return its result."""
        self.check()
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return result.result(_CALL_TIMEOUT_S)
        except TimeoutError:
            self.check()
            raise TrainingError(
                f"the thread that manages the {self.server_name}s did not answer within {_CALL_TIMEOUT_S:g} s"
            ) from None

    # Runs in the fleet's thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._abort(TrainingError(f"the thread that manages the {self.server_name}s has failed: {error!r}"))
        finally:
            self._started.set()
            self._changed.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._servers = [
            Server(index=i, name=f"{self.server_name} {i}", handle=handle, failure=self._loop.create_future())
            for i, handle in enumerate(self.handles)
        ]
        async with self.client() as self._client:
            self._supervisor = Supervisor(
                client=self._client,
                limits=self.limits,
                find_cause=self.find_cause,
                failures_pause_starts=self.failures_pause_starts,
                notify=self.notify,
                on_up=self._signal_change,
                on_down=self._release,
            )
            tasks = [asyncio.create_task(self._supervise(server)) for server in self._servers]
            for task in tasks:
                task.add_done_callback(self._check_task)
            self._started.set()
            await self._closing.wait()
            self._abort(TrainingError(_CLOSED))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._leases, return_exceptions=True)
            await asyncio.gather(*(s.in_thread(s.handle.stop) for s in self._servers), return_exceptions=True)

    async def _supervise(self, server: Server) -> None:
        failure = await self._supervisor.supervise(server)
        message = f"{server} failed {server.num_failures} times without a completion in between"
        if all(s.state is State.LOST for s in self._servers):
            self._abort(TrainingError(f"no {self.server_name} is left: {message}. {failure}"))
        else:
            self.notify(f"{message}; continuing without it. {failure}")

    def _dispatch(self) -> None:
        """Lease queued requests in order while servers have room."""
        waiting: list[Job] = []
        while self._queue and not self._fatal:
            job = self._queue.pop(0)
            if job.only and not self._same_start(job.only):
                self._finish(job, ServerError(f"{job.only.url} has failed"))
                continue
            if (server := self._server_for(job)) is None:
                waiting.append(job)
                if job.only:
                    continue  # the other servers need not wait for it
                break
            if error := server.length_error(job.request):
                self._finish(job, error)
                continue
            server.num_in_flight += job.request.num_completions
            job.num_leases += 1
            task = asyncio.create_task(self._lease(server, job.request))
            self._leases[task] = server, job
            task.add_done_callback(self._end_lease)
        self._queue[:0] = waiting

    def _server_for(self, job: Job) -> Server | None:
        """Return a server with room for a request; None if there is none.

        The emptiest, or one on the node that sends the request unless that has more than `_NEAR_LOAD` times as much to
        do: none is idle while others have work.
        """
        candidates = [self._servers[job.only.index]] if job.only else self._servers
        fits = [s for s in candidates if self._serves(s) and self._room(s) >= job.request.num_completions]
        server = max(fits, key=self._room, default=None)
        if server is None or not (names := job.request.node_names):
            return server
        near = max((s for s in fits if s.host in names), key=self._room, default=server)
        return near if near.num_in_flight <= _NEAR_LOAD * server.num_in_flight else server

    def _serves(self, server: Server) -> bool:
        return server.state is State.UP and server.version == self._target is not None and not server.backing_off

    def _room(self, server: Server) -> int:
        return self.limits.max_num_seqs - server.num_in_flight

    async def _lease(self, server: Server, request: Request) -> list[ModelCall]:
        """Attempt a request once."""
        had = server.version

        def allows(version: int) -> bool:
            return had is not None and self._target is not None and had <= version <= self._target

        return await request.send(self._client, server.handle.url, allows=allows)

    def _end_lease(self, task: "asyncio.Task[list[ModelCall]]") -> None:
        """Handle the result of an attempt. A callback, since the task may be cancelled before it starts."""
        server, job = self._leases.pop(task)
        server.num_in_flight -= job.request.num_completions
        # cancelled: the server failed elsewhere, or the fleet is closing
        error = ServerError(f"{server} has failed") if task.cancelled() else task.exception()
        if error is None:
            server.num_failures = server.num_busy = 0
            server.last_failure = None
            self._finish(job, task.result())
        elif isinstance(error, BusyError):
            job.num_leases -= 1  # not the request's fault
            self._back_off(server, error)
            self._requeue(job, error)
        elif isinstance(error, ServerError):
            server.fail(error)
            self._requeue(job, error)
        elif isinstance(error, UserError | CallerEnded):
            self._finish(job, error)
        else:
            self._check_task(task)
        self._dispatch()

    def _requeue(self, job: Job, error: ServerError) -> None:
        """Put a request whose lease failed back into the queue."""
        if job.only:
            self._finish(job, error)
        elif job.num_leases >= _MAX_LEASES:
            self._abort(TrainingError(f"{job.num_leases} servers failed at prompt {job.request.prompt_id}: {error}"))
        elif job in self._unfinished:
            insort(self._queue, job)

    def _finish(self, job: Job, outcome: list[ModelCall] | Exception) -> None:
        if job not in self._unfinished:
            return
        self._unfinished.remove(job)
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)
        self._changed.set()

    def _back_off(self, server: Server, error: BusyError) -> None:
        """Send a busy server no requests for a while. A server that is busy for too long has failed."""
        if server.backing_off:
            return
        now = self._loop.time()
        server.busy_since = server.busy_since if server.num_busy else now
        server.num_busy += 1
        server.backing_off = True
        if now - server.busy_since > self.limits.request_timeout_s:
            server.fail(error)

        def resume() -> None:
            server.backing_off = False
            self._dispatch()

        self._loop.call_later(self.limits.pause_s(server.num_busy), resume)

    def _release(self, server: Server) -> None:
        """Return a failed server's requests to the queue."""
        for task, (leased_to, _) in self._leases.items():
            if leased_to is server:
                task.cancel()
        self._dispatch()  # requests for this server only now fail

    def _same_start(self, running: RunningServer) -> Server | None:
        """Return the server if it is up and has not been restarted since; else None."""
        server = self._servers[running.index]
        return server if server.state is State.UP and server.num_starts == running.num_starts else None

    def _signal_change(self) -> None:
        self._changed.set()
        self.on_change()

    def _check_task(self, task: "asyncio.Task[Any]") -> None:
        """Abort if a task ended with an unexpected error."""
        if not task.cancelled() and (error := task.exception()):
            self._abort(TrainingError(f"the thread that manages the {self.server_name}s has failed: {error!r}"))

    def _abort(self, error: TrainingError) -> None:
        """Fail all requests, now and later."""
        self._fatal = self._fatal or error
        self._queue.clear()
        for task in self._leases:
            task.cancel()
        for job in list(self._unfinished):
            self._finish(job, self._fatal)
        self._signal_change()
