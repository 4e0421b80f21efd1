"""Rollout workers, seen from rank 0: which group is where, and what the fleet leases to them."""

import asyncio
import pickle
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from cohort.errors import TrainingError, UserError, describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S, Child, ChildFailed
from cohort.records import ModelCall, Prompt, RolloutGroup, Trajectory
from cohort.rollout.engines.base import SamplingParams, StepKey
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import CallerEnded, Client, ServerError
from cohort.rollout.workers.nodes import LOOPBACK, MAX_BYTES, Place, node_names
from cohort.rollout.workers.packed_groups import read_group, read_message
from cohort.rollout.workers.worker_main import WorkerCode, as_error, described

_SILENT_S = 300.0  # a worker that sends nothing for so long hangs: its event loop is blocked
_MAX_LOSSES = 3  # workers; if so many end with the same group, the run ends


@dataclass(slots=True, kw_only=True, eq=False)
class SubmittedGroup:
    """A group that a worker samples."""

    number: int  # order of submission
    prompt: Prompt
    content: bytes  # prompt, sampling parameters and key
    result: "asyncio.Future[RolloutGroup]"
    num_losses: int = 0  # workers that ended before it was finished

    def finish(self, outcome: RolloutGroup | Exception) -> None:
        """Set the result, from any thread."""

        def set_result() -> None:
            if self.result.done():  # cancelled
                return
            if isinstance(outcome, Exception):
                self.result.set_exception(outcome)
            else:
                self.result.set_result(outcome)

        with suppress(RuntimeError):  # the collector is closed
            self.result.get_loop().call_soon_threadsafe(set_result)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteRequest:
    """A request whose tokens and completions only a worker has. Implements `handles.Request`."""

    worker: "RolloutWorker"
    number: int  # of the worker
    prompt_id: int
    num_completions: int
    num_tokens: int
    max_completion_tokens: int
    urgent: bool

    @property
    def node_names(self) -> frozenset[str]:
        """Names of the worker's node."""
        return self.worker.place.names

    async def send(self, client: Client, url: str, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Let the worker send it."""
        versions = await self.worker.lease(self.number, url)
        if not all(map(allows, versions)):
            raise ServerError(f"{url} sampled prompt {self.prompt_id} with unexpected weight versions {versions}")
        return []


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Stands for the environment of a trajectory that a worker has sampled."""

    worker: "RolloutWorker"
    group: int
    index: int


class RolloutWorkers:
    """Worker processes over a fleet. Groups go to them in turn; those of a worker that ends are sampled again."""

    def __init__(self, code: WorkerCode, fleet: Fleet, *, num_workers: int, elsewhere: Sequence[Place] = ()):
        """Start the processes without waiting for them.

        Args:
            code: what they run.
            fleet: sends requests.
            num_workers: number of processes on this node; at least one.
            elsewhere: places of workers on other nodes; closed with the workers.
        """
        names = node_names() | {*LOOPBACK}
        own = [Place(index=index, names=names) for index in range(num_workers)]
        self._places = sorted([*own, *elsewhere], key=lambda place: place.index)  # nodes in turn
        self._own = [number for number, place in enumerate(self._places) if place.node is None]
        self.fleet = fleet
        self._content = pickle.dumps(code)
        self._lock = threading.Lock()
        self._numbers = count()
        self._counts = Counter(lost_workers=0)
        self._notes: set[str] = set()
        self._failure: Exception | None = None
        self._is_closing = False
        # None: one has ended, and the next group starts another
        self._workers: list[RolloutWorker | None] = [None] * len(self._places)
        try:
            for number, place in enumerate(self._places):
                self._workers[number] = RolloutWorker(self, place, self._content)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this node."""
        children = [worker.child for worker in self._workers if worker is not None]
        return [child.process.pid for child in children if isinstance(child, Child)]

    def start(
        self, prompt: Prompt, sampling: SamplingParams, key: StepKey, result: "asyncio.Future[RolloutGroup]"
    ) -> None:
        """Let the next worker sample a group.

        Raises:
            UserError: the prompt's columns cannot be sent to another process.
        """
        try:
            content = pickle.dumps((prompt, sampling, key))
        except Exception as error:
            raise UserError(
                f"rollout.workers: the row of prompt {prompt.id} cannot be sent to another process "
                f"({describe_error(error)}); use rollout.workers: 1"
            ) from error
        group = SubmittedGroup(number=next(self._numbers), prompt=prompt, content=content, result=result)
        with self._lock:
            self._assign(group, group.number)

    def num_unfinished(self) -> int:
        """Return the number of groups without a result."""
        with self._lock:
            return sum(len(worker.groups) for worker in self._workers if worker is not None)

    def counts(self) -> Mapping[str, int]:
        """Return events since the last call, by name."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter(dict.fromkeys(self._counts, 0))
        return counts

    def release(self, trajectory: Trajectory) -> None:
        """Free the environment of a trajectory that a worker has sampled."""
        if isinstance(ticket := trajectory.environment, _Elsewhere):
            ticket.worker.release(ticket.group, ticket.index)

    def close(self) -> None:
        """End the processes, which close their environments."""
        with self._lock:
            self._is_closing = True
            workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.hang_up()
        deadline = time.monotonic() + 2 * CLOSE_TIMEOUT_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    # Called in the threads of workers.

    def add(self, *, counts: Mapping[str, int], notes: Sequence[str]) -> None:
        """Add what a worker has counted, and show its messages once."""
        with self._lock:
            self._counts.update({str(name): int(number) for name, number in counts.items()})
            new = [text for text in dict.fromkeys(map(str, notes)) if text not in self._notes]
            self._notes.update(new)
        for text in new:
            self.fleet.notify(text)

    def finish(self, worker: "RolloutWorker", message: Mapping[str, Any]) -> None:
        """Set the result of a group. Raises as `read_group` does."""
        number = message["group"]
        with self._lock:
            group = worker.groups.get(number)
        if group is None:
            return
        if "error" in message:
            outcome: RolloutGroup | Exception = as_error(message["error"])
        else:
            outcome = read_group(message, group.prompt, environment=partial(_Elsewhere, worker, number))
        with self._lock:
            del worker.groups[number]
            worker.place.num_losses = 0
        group.finish(outcome)

    def fail(self, error: Exception) -> None:
        """Fail all groups, now and later: the workers cannot load their code."""
        with self._lock:
            self._failure = error
            groups = [group for worker in self._workers if worker is not None for group in worker.groups.values()]
        for group in groups:
            group.finish(error)

    def replace(self, ended: "RolloutWorker", failure: str) -> None:
        """Sample the groups of a worker that has ended again: in another one in its place, if that is on this node.

        Those of another node go to this one, and a place there whose workers only end gets no more of them: what other
        nodes lack need not end the run.
        """
        place = ended.place
        with self._lock:
            if self._is_closing or self._failure is not None:
                return
            number = self._workers.index(ended)
            self._workers[number] = None
            if place.node is not None:
                place.num_losses += 1
                place.is_lost |= place.num_losses >= _MAX_LOSSES
            groups = list(ended.groups.values())
            for group in groups:
                group.num_losses += place.node is None
                if group.num_losses < _MAX_LOSSES:
                    own = self._own[group.number % len(self._own)]
                    self._assign(group, number if place.node is None else own)
        for group in groups:
            if group.num_losses >= _MAX_LOSSES:
                group.finish(
                    TrainingError(
                        f"{group.num_losses} rollout workers ended while they sampled prompt {group.prompt.id}; the "
                        f"last {failure}"
                    )
                )
        again = f"; its {len(groups)} groups are sampled again" if groups else ""
        self.add(counts={"lost_workers": 1}, notes=())
        last = "; it is not replaced" if place.is_lost else ""
        self.fleet.notify(f"warning: a rollout worker{place} {failure}{again}{last}")

    def _assign(self, group: SubmittedGroup, first: int) -> None:
        """Let a worker sample a group, that of the place with number `first` or of the next where there can be one."""
        if self._failure is not None:
            group.finish(self._failure)
            return
        number = first % len(self._places)
        place = self._places[number]
        if place.is_lost:  # no place on this node ever is
            self._assign(group, number + 1)
            return
        try:
            worker = self._workers[number] or RolloutWorker(self, place, self._content)
        except TrainingError as error:  # another node does not answer: do not wait for it again
            for other in self._places:
                other.is_lost |= other.node is place.node
            self.fleet.notify(f"warning: {error}")
            self._assign(group, number + 1)
        except (OSError, RuntimeError) as error:  # no memory, processes, descriptors or threads
            group.finish(TrainingError(f"a rollout worker cannot be started: {error}"))
        else:
            self._workers[number] = worker
            worker.take(group)


class RolloutWorker:
    """One worker process, with a thread that sends and one that receives."""

    def __init__(self, pool: RolloutWorkers, place: Place, content: bytes):
        """Start the process."""
        self.place = place
        self.groups: dict[int, SubmittedGroup] = {}  # guarded by the pool's lock
        self.child = place.start()
        self.child.limit(pool.fleet.limits.start_timeout_s)
        self._pool = pool
        self._posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lease_numbers = count()
        self._leases: dict[int, asyncio.Future[list[int]]] = {}  # only used in the fleet's event loop
        self._has_ended = False
        self._threads = [
            threading.Thread(target=run, name=f"rollout worker {place.index}{place}", daemon=True)
            for run in (partial(self._send, content), self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, group: SubmittedGroup) -> None:
        """Let the process sample a group."""
        self.groups[group.number] = group
        self._posted.put(("group", group.number, group.content))

    async def lease(self, number: int, url: str) -> list[int]:
        """Let the process send one of its requests to a server, and return the policy versions of the completions.

        Raises:
            CallerEnded: the process has ended.
            Exception: what `Client.generate` raises.
        """
        if self._has_ended:
            raise CallerEnded
        lease = next(self._lease_numbers)
        answered = self._leases[lease] = asyncio.get_running_loop().create_future()
        self._posted.put(("lease", lease, number, url))
        try:
            return await answered
        except asyncio.CancelledError:
            self._posted.put(("cancel", lease))
            raise
        finally:
            del self._leases[lease]

    def release(self, group: int, index: int) -> None:
        """Let the process free the environment of a trajectory."""
        self._posted.put(("release", group, index))

    def hang_up(self) -> None:
        """Tell the process to end, after what was posted before."""
        self._posted.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the process has ended, but not longer than `timeout_s`; then kill it."""
        self._threads[-1].join(timeout_s)
        self.child.kill()

    def _send(self, content: bytes) -> None:
        """Send what is posted, in few messages, and hang up at the end: what comes later needs no answer."""
        with suppress(ChildFailed, BlockingIOError):  # which `_receive` learns by itself
            self.child.send([(sys.path, content)])
            is_end = False
            while not is_end:
                messages, is_end = self._next_messages()
                self.child.send(messages)
        self.child.hang_up()

    def _next_messages(self) -> tuple[list[Any], bool]:
        """Wait for a message; return all that are posted, and whether they are the last ones."""
        messages = [self._posted.get()]
        with suppress(queue.Empty):
            while messages[-1] is not None:
                messages.append(self._posted.get_nowait())
        return ([*filter(None, messages)], messages[-1] is None)

    def _receive(self) -> None:
        limit_s = self._pool.fleet.limits.start_timeout_s
        try:
            while True:
                self._on_message(self.child.receive(read_message, max_bytes=MAX_BYTES))
                if limit_s != _SILENT_S:  # it has loaded the code
                    limit_s = _SILENT_S
                    self.child.limit(limit_s)
        except ChildFailed as failed:
            failure = str(failed)
        except BlockingIOError:
            failure = f"sent nothing for {limit_s:g} s{self.child.describe_output()}"
        except Exception as error:  # of whatever a message lacks
            failure = f"sent an invalid message: {error!r:.200}"
        self.child.kill()
        self._posted.put(None)
        self._has_ended = True
        self._pool.fleet.call_soon(self._end_leases)
        self._pool.replace(self, failure)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        self._pool.add(counts=message.get("counts", {}), notes=message.get("notes", ()))
        if "failed" in message:
            kind, text = message["failed"]
            self._pool.fail(as_error((kind, f"{text}{self.place}")))
        elif "group" in message:
            self._pool.finish(self, message)
        if outcomes := message.get("outcomes"):
            self._pool.fleet.call_soon(self._end_attempts, outcomes)
        if requests := message.get("requests"):
            self._submit([RemoteRequest(worker=self, **request) for request in requests])

    def _submit(self, requests: Sequence[RemoteRequest]) -> None:
        submitted: list[tuple[RemoteRequest, Future[list[ModelCall]]]] = []
        for request in requests:
            future: Future[list[ModelCall]] = Future()
            future.add_done_callback(partial(self._answer, request.number))
            submitted.append((request, future))
        try:
            self._pool.fleet.submit(submitted)
        except (TrainingError, RuntimeError) as error:  # the fleet has failed, or is closed
            for _, future in submitted:
                future.set_exception(error)

    def _answer(self, number: int, future: "Future[list[ModelCall]]") -> None:
        """Tell the process that its request is done. Called in the fleet's thread."""
        error = future.exception()
        if not isinstance(error, CallerEnded):
            self._posted.put(("done", number, None if error is None else described(error)))

    # Called in the fleet's event loop.

    def _end_attempts(self, outcomes: Sequence[tuple[int, list[int], Sequence[str] | None]]) -> None:
        for lease, versions, error in outcomes:
            answered = self._leases.get(lease)
            if answered is None or answered.done():
                continue
            if error is None:
                answered.set_result(versions)
            else:
                answered.set_exception(as_error(error))

    def _end_leases(self) -> None:
        for answered in self._leases.values():
            if not answered.done():
                answered.set_exception(CallerEnded())
