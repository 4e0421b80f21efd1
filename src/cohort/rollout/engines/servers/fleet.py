"""The servers of a run, in a thread of their own: who is up, who samples what, and who has failed.

Every request is leased to one server until a deadline. Whatever happens to the server, the request is then either
answered, once, or back in the queue.
"""

import asyncio
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from cohort.errors import TrainingError, UserError
from cohort.rollout.engines.servers.handles import FleetLimits, Job, RunningServer, Server, ServerHandle, State
from cohort.rollout.engines.servers.requests import BusyError, Client, GeneratedGroup, GenerateRequest, ServerError
from cohort.rollout.engines.servers.supervisor import Supervisor

T = TypeVar("T")

# A request that so many servers have failed at, one after the other, is the likely cause.
_MAX_LEASES = 10
_CALL_TIMEOUT_S = 60.0  # of what the fleet's thread does at once
_CLOSE_TIMEOUT_S = 60.0
_CLOSED = "the rollout engine was closed before this was sampled"


class Fleet:
    """Leases requests to servers and keeps the servers running. Its methods are for one thread, that of the loop."""

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        client: Callable[[], Client],
        limits: FleetLimits,
        *,
        server_name: str,
        find_cause: Callable[[str], str | None] = lambda log: None,
    ):
        """Start the servers; returns at once.

        Args:
            handles: of the servers.
            client: makes the client, in the fleet's thread.
            limits: of times and failures.
            server_name: of one of them in messages, such as "vLLM server".
            find_cause: why a server ended, from its log; None where the log does not tell.
        """
        self.limits = limits
        self.server_name = server_name
        self._find_cause = find_cause
        self._make_client = client
        self._handles = handles
        self._servers: list[Server] = []
        self._queue: list[Job] = []  # sorted
        self._unfinished: set[Job] = set()
        self._leases: dict[asyncio.Task[GeneratedGroup], tuple[Server, Job]] = {}
        self._numbers = count()
        self._target: int | None = None  # the version of the policy that a server must have to get work
        self._notes: deque[str] = deque()
        self._fatal: TrainingError | None = None
        self.on_change: Callable[[], None] = lambda: None  # called in the fleet's thread when servers come, go or fail
        self._changed = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()
        if not self._begun.wait(_CALL_TIMEOUT_S):
            raise TrainingError(f"the thread of the {server_name}s does not start within {_CALL_TIMEOUT_S:g} s")
        self.check()

    # What the other thread calls.

    def check(self) -> None:
        """Raises `TrainingError` if the fleet cannot go on."""
        if self._fatal:
            raise self._fatal

    def notes(self) -> Iterator[str]:
        """What a person should know, since the last call."""
        while self._notes:
            yield self._notes.popleft()

    def wait_for_change(self, timeout_s: float) -> None:
        """Until something has happened since the last call, but not for longer."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def submit(
        self,
        requests: Iterable[tuple[GenerateRequest, Future[GeneratedGroup]]],
        *,
        urgent: bool = False,
        only: RunningServer | None = None,
    ) -> None:
        """Begin to sample. The fleet's thread sets each future: to the completions, or to what is in their way.

        Args:
            requests: in the order in which they are wanted, with their futures.
            urgent: before all that is not; what is under way goes on.
            only: the one server that must do them; then its failure, a `ServerError`, is theirs.
        """
        self.check()
        jobs = [Job(number=next(self._numbers), request=r, result=f, urgent=urgent, only=only) for r, f in requests]

        def enqueue() -> None:
            self._unfinished.update(jobs)
            self._queue = sorted([*self._queue, *jobs])
            self._dispatch()

        self._call(enqueue)

    def num_unfinished(self) -> int:
        """Requests that are neither answered nor refused."""
        return len(self._unfinished)

    def running(self) -> list[RunningServer]:
        """The servers that are up."""
        return self._call(
            lambda: [
                RunningServer(index=s.index, num_starts=s.num_starts, url=s.handle.url, version=s.version)
                for s in self._servers
                if s.state is State.UP
            ]
        )

    def num_starting(self, *, first_time: bool = False) -> int:
        """Servers that may come up without having failed again; or those that have never failed or come up."""
        return self._call(
            lambda: sum(s.state is State.STARTING and (s.num_starts <= 1 or not first_time) for s in self._servers)
        )

    def aim(self, version: int) -> None:
        """Give work to those servers alone that have this version of the policy."""

        def change() -> None:
            self._target = version
            self._dispatch()

        self._call(change)

    @contextmanager
    def publishing(self, servers: Iterable[RunningServer]) -> Iterator[None]:
        """Weights are on their way to these servers, which need not answer until they are there."""

        def mark(publishing: bool) -> None:
            for server in filter(None, map(self._same_start, servers)):
                server.publishing = publishing

        self._call(lambda: mark(True))
        try:
            yield
        finally:
            self._call(lambda: mark(False))

    def has(self, server: RunningServer, version: int | None) -> None:
        """The server has this version of the policy now; None: it has none."""

        def change() -> None:
            if same := self._same_start(server):
                same.version = version
            self._dispatch()

        self._call(change)

    def fail(self, server: RunningServer, error: ServerError) -> None:
        """The server does not do what it should: it is started again, and its requests go to others."""

        def change() -> None:
            if same := self._same_start(server):
                same.fail(error)

        self._call(change)

    def hold_starts(self, hold: bool) -> None:
        """Start no server until told otherwise."""
        self._call(self._supervisor.may_start.clear if hold else self._supervisor.may_start.set)

    def close(self) -> None:
        """End the servers of this run. What is unfinished fails with a `TrainingError`."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._die(TrainingError(_CLOSED))  # where the thread could not

    def _call(self, function: Callable[[], T]) -> T:
        """The result of a quick function, run in the fleet's thread."""
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
                f"the thread of the {self.server_name}s does not answer within {_CALL_TIMEOUT_S:g} s"
            ) from None

    # What the fleet's thread does.

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._die(TrainingError(f"the thread of the {self.server_name}s has failed: {error!r}"))
        finally:
            self._begun.set()
            self._changed.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._servers = [
            Server(index=i, name=f"{self.server_name} {i}", handle=handle, failure=self._loop.create_future())
            for i, handle in enumerate(self._handles)
        ]
        async with self._make_client() as self._client:
            self._supervisor = Supervisor(
                self._client,
                self.limits,
                find_cause=self._find_cause,
                note=self._note,
                on_up=self._tell_change,
                on_down=self._release,
            )
            tasks = [asyncio.create_task(self._supervise(server)) for server in self._servers]
            for task in tasks:
                task.add_done_callback(self._crashed)
            self._begun.set()
            await self._over.wait()
            self._die(TrainingError(_CLOSED))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._leases, return_exceptions=True)
            await asyncio.gather(*(s.in_thread(s.handle.stop) for s in self._servers), return_exceptions=True)

    async def _supervise(self, server: Server) -> None:
        last_words = await self._supervisor.supervise(server)
        failures = f"{server} has failed {server.num_failures} times with no completion between"
        if all(s.state is State.LOST for s in self._servers):
            self._die(TrainingError(f"no {self.server_name} is left. {failures}. {last_words}"))
        else:
            self._note(f"{failures}: the run goes on without it. {last_words}")

    def _dispatch(self) -> None:
        """Leases requests in their order as long as there is room."""
        waiting: list[Job] = []
        while self._queue and not self._fatal:
            job = self._queue.pop(0)
            if job.only and not self._same_start(job.only):
                self._finish(job, ServerError(f"{job.only.url} has failed"))
                continue
            server = max(filter(self._serves, self._candidates(job)), key=self._room, default=None)
            if server is None or self._room(server) < job.request.num_completions:
                waiting.append(job)
                if job.only:
                    continue  # the other servers need not wait for this one
                break
            if error := server.why_too_long(job.request):
                self._finish(job, error)
                continue
            server.num_in_flight += job.request.num_completions
            job.num_leases += 1
            task = asyncio.create_task(self._lease(server, job.request))
            self._leases[task] = server, job
            task.add_done_callback(self._end_lease)
        self._queue[:0] = waiting

    def _candidates(self, job: Job) -> Sequence[Server]:
        return [self._servers[job.only.index]] if job.only else self._servers

    def _serves(self, server: Server) -> bool:
        return server.state is State.UP and server.version == self._target is not None and not server.resting

    def _room(self, server: Server) -> int:
        return self.limits.max_num_seqs - server.num_in_flight

    async def _lease(self, server: Server, request: GenerateRequest) -> GeneratedGroup:
        """One attempt at a request."""
        had = server.version

        def allows(version: int) -> bool:
            return had is not None and self._target is not None and had <= version <= self._target

        group = await self._client.generate(server.handle.url, request, allows=allows)
        if not len(group.completions) == len(group.policy_versions) == request.num_completions:
            raise ServerError(
                f"{server} answered wrongly for prompt {request.prompt_id}: {len(group.completions)} completions with "
                f"{len(group.policy_versions)} policy versions instead of {request.num_completions}"
            )
        return group

    def _end_lease(self, task: "asyncio.Task[GeneratedGroup]") -> None:
        """What came of an attempt. Here and not in its task, which may be cancelled before it begins."""
        server, job = self._leases.pop(task)
        server.num_in_flight -= job.request.num_completions
        # cancelled: the server has failed at something else, or all is over
        error = ServerError(f"{server} has failed") if task.cancelled() else task.exception()
        if error is None:
            server.num_failures = server.num_rests = 0
            server.last_end = None
            self._finish(job, task.result())
        elif isinstance(error, BusyError):
            job.num_leases -= 1  # no fault of the request
            self._rest(server, error)
            self._give_back(job, error)
        elif isinstance(error, ServerError):
            server.fail(error)
            self._give_back(job, error)
        elif isinstance(error, UserError):
            self._finish(job, error)
        else:
            self._crashed(task)
        self._dispatch()

    def _give_back(self, job: Job, error: ServerError) -> None:
        """A request whose lease has ended without completions."""
        if job.only:
            self._finish(job, error)
        elif job.num_leases >= _MAX_LEASES:
            self._die(TrainingError(f"{job.num_leases} servers have failed at prompt {job.request.prompt_id}: {error}"))
        elif job in self._unfinished:
            insort(self._queue, job)

    def _finish(self, job: Job, outcome: GeneratedGroup | Exception) -> None:
        if job not in self._unfinished:
            return
        self._unfinished.remove(job)
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)
        self._changed.set()

    def _rest(self, server: Server, error: BusyError) -> None:
        """Leave a server that has no room alone for a while; one that has none for too long has failed."""
        if server.resting:
            return
        now = self._loop.time()
        server.full_since = server.full_since if server.num_rests else now
        server.num_rests += 1
        server.resting = True
        if now - server.full_since > self.limits.request_timeout_s:
            server.fail(error)

        def go_on() -> None:
            server.resting = False
            self._dispatch()

        self._loop.call_later(self.limits.pause_s(server.num_rests), go_on)

    def _release(self, server: Server) -> None:
        """A server has failed: its requests go back to the queue."""
        for task, (leased_to, _) in self._leases.items():
            if leased_to is server:
                task.cancel()
        self._dispatch()  # those that only this server may do

    def _same_start(self, running: RunningServer) -> Server | None:
        server = self._servers[running.index]
        return server if server.state is State.UP and server.num_starts == running.num_starts else None

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self.on_change()

    def _crashed(self, task: "asyncio.Task[Any]") -> None:
        """Sees to it that no task ends unseen."""
        if not task.cancelled() and (error := task.exception()):
            self._die(TrainingError(f"the thread of the {self.server_name}s has failed: {error!r}"))

    def _die(self, error: TrainingError) -> None:
        """Nothing can be sampled any more."""
        self._fatal = self._fatal or error
        self._queue.clear()
        for task in self._leases:
            task.cancel()
        for job in list(self._unfinished):
            self._finish(job, self._fatal)
        self._tell_change()
