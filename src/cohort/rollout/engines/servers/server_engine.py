"""Rollout engine over a fleet of servers that have the trainer's weights."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cohort.errors import TrainingError
from cohort.records import IntArray, ModelCall, Prompt, RolloutGroup
from cohort.rollout.collector import RolloutCollector
from cohort.rollout.engines.base import CallKey, CallQueue, PendingCall, SamplingParams, StepKey
from cohort.rollout.engines.servers.channels import Channel, Channels
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import (
    GenerateRequest,
    RunningServer,
    ServerError,
    answer_calls,
    requests_for,
)

if TYPE_CHECKING:
    from cohort.rollout.workers.nodes import Place
    from cohort.rollout.workers.worker_pool import RolloutWorkers

# How often to check that the fleet's thread is alive.
_TICK_S = 0.5


@dataclass(slots=True, eq=False)
class ServerEngine:
    """Submits model calls to the fleet and sends weights to its servers.

    Weights are sent in the calling thread, since all training ranks take part: in `update_weights`, and in `advance` to
    servers that have started since.
    """

    fleet: Fleet  # closed with the engine
    _: KW_ONLY
    channels: Channels[Channel]  # through which weights are sent; closed with the engine
    notify: Callable[[str], None]  # receives messages for the user, in the calling thread
    while_waiting: Callable[[], None] = lambda: None  # called about twice a second during waits
    sleeps: bool = False  # whether servers share GPUs with training and sleep while it runs
    make_room: Callable[[], object] = lambda: None  # frees cached GPU memory before servers wake up or restart
    _waiting: defaultdict[RunningServer | None, CallQueue] = field(  # by the `only` of `generate`
        default_factory=lambda: defaultdict(CallQueue), init=False
    )
    workers: "RolloutWorkers | None" = field(default=None, init=False)  # of `start_workers`
    _groups: list[tuple[Any, ...]] = field(default_factory=list, init=False)  # arguments of `RolloutWorkers.start`
    _asleep: bool = field(default=False, init=False)
    _may_restart: bool = field(default=True, init=False)  # whether servers that share GPUs may take memory now
    _policy_version: int | None = field(default=None, init=False)

    async def generate(
        self, token_ids: IntArray, sampling: SamplingParams, key: CallKey, *, only: RunningServer | None = None
    ) -> ModelCall:
        """Sample a continuation of `token_ids` [K], on any server or on `only` this one.

        Raises:
            UserError: the context cannot be sampled from.
            ServerError: `only` has failed.
            TrainingError: no server is left, or many servers failed at the same prompt.
        """
        self.fleet.on_change = partial(_wake_up, asyncio.get_running_loop())
        return await self._waiting[only].put(token_ids, sampling, key)

    def start_workers(
        self,
        load: Callable[[Callable[[str], None]], tuple[Any, Mapping[str, Any]]],
        *,
        num_workers: int,
        elsewhere: "Sequence[Place]" = (),
    ) -> dict[str, Any]:
        """Start processes that sample whole groups from the servers of this engine.

        Args:
            load: see `WorkerCode`; its result depends on the process only.
            num_workers: number of processes on this node.
            elsewhere: places of processes on other nodes.

        Returns:
            The options of the `RolloutCollector` whose groups they sample.
        """
        from cohort.rollout.workers.worker_main import WorkerCode
        from cohort.rollout.workers.worker_pool import RolloutWorkers

        code = WorkerCode(load=load, client=self.fleet.client, max_num_seqs=self.fleet.limits.max_num_seqs)
        self.workers = workers = RolloutWorkers(code, self.fleet, num_workers=num_workers, elsewhere=elsewhere)
        return {
            "sample_group": self._sample_group,
            "release": workers.release,
            "close_environments": workers.close,
            "counts": workers.counts,
        }

    async def _sample_group(self, prompt: Prompt, sampling: SamplingParams, key: StepKey) -> RolloutGroup:
        """Let a worker sample a group."""
        loop = asyncio.get_running_loop()
        self.fleet.on_change = partial(_wake_up, loop)
        result: asyncio.Future[RolloutGroup] = loop.create_future()
        self._groups.append((prompt, sampling, key, result))
        return await result

    def advance(self) -> bool:
        """Submit waiting calls to the servers, and groups to workers. Newly started servers receive weights first.

        Raises:
            TrainingError: no server is left, or many servers failed at the same prompt.
        """
        calls = {only: taken for only, queue in self._waiting.items() if (taken := queue.take())}
        self._waiting.clear()  # servers come and go
        groups, self._groups = self._groups, []
        if calls or groups:
            assert self._policy_version is not None, "update_weights comes first"
            self._wake()
        self._poll_fleet()
        for only, taken in calls.items():
            self._submit(taken, only)
        for group in groups:
            assert self.workers is not None, "only workers sample groups"
            self.workers.start(*group)
        return bool(calls or groups)

    def update_weights(self, *, policy_version: int) -> None:
        """Send the trainer's weights to all servers that are up; others receive them once they start.

        Raises:
            TrainingError: no server is left.
        """
        self._policy_version = policy_version
        self.fleet.set_policy_version(policy_version)
        self._wake()
        self._poll_fleet()

    def sample_on_each_server(
        self, collector: RolloutCollector, prompts: Sequence[Prompt], sampling: SamplingParams, key: StepKey
    ) -> dict[str, list[RolloutGroup]]:
        """Sample the same prompts on every server and return the groups by server address.

        Waits for servers in their first start. Servers that fail are left out; if all fail, sampling is retried.

        Args:
            collector: collects groups from this engine.
            prompts: prompts to sample.
            sampling: sampling parameters.
            key: key of the random streams, which are the same on every server.

        Raises:
            TrainingError: no server is left, or all servers failed repeatedly.
        """
        failures: list[ServerError] = []
        for _ in range(self.fleet.limits.max_server_failures + 1):
            self._wake()
            self._wait_until(self._all_serve)
            tasks = {}
            for server in self._serving():
                generate = partial(self.generate, only=server)
                groups = [collector.group(generate, prompt, sampling, key) for prompt in prompts]
                tasks[server.url] = collector.start(_unless_server_fails(groups))
            collector.wait(list(tasks.values()), count=len(tasks))
            outcomes = {url: task.result() for url, task in tasks.items()}
            failures = [outcome for outcome in outcomes.values() if isinstance(outcome, ServerError)]
            if sampled := {url: o for url, o in outcomes.items() if not isinstance(o, ServerError)}:
                return sampled
        raise TrainingError(f"every {self.fleet.server_name} failed repeatedly at the same prompts: {failures[0]}")

    def close(self) -> None:
        """Close the fleet. Calls in flight fail with a `TrainingError`."""
        self.fleet.close()
        self._forward_notes()
        self.channels.close()

    def _submit(self, calls: Sequence[PendingCall], only: RunningServer | None) -> None:
        requests: list[tuple[GenerateRequest, Future[list[ModelCall]]]] = []
        for request, answered in requests_for(calls, max_num_seqs=self.fleet.limits.max_num_seqs):
            future: Future[list[ModelCall]] = Future()
            future.add_done_callback(partial(_answer_soon, answered))
            requests.append((request, future))
        self.fleet.submit(requests, only=only)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._poll_fleet()
        while not condition():
            self.fleet.wait_for_change(_TICK_S)
            self.while_waiting()
            self._poll_fleet()

    def _poll_fleet(self) -> None:
        """Forward messages, raise errors, and send weights to servers with old ones."""
        self._forward_notes()
        self.fleet.check()
        if self.sleeps and self._may_restart and self.fleet.starts_paused():  # since a server has failed
            self.make_room()
            self.fleet.pause_starts(False)
        if self._policy_version is None or self._asleep:
            return
        behind = [s for s in self.fleet.running() if s.version != self._policy_version]
        if behind:
            self._update_weights(behind, self._policy_version)
            self._forward_notes()

    def _forward_notes(self) -> None:
        for text in self.fleet.notes():
            self.notify(text)

    def _all_serve(self) -> bool:
        """Whether no server is in its first start, and all that are up have the current weights."""
        if self.fleet.num_starting(first_time=True):
            return False
        running = self.fleet.running()  # queried second, so that it includes servers that came up in between
        return bool(running) and all(s.version == self._policy_version for s in running)

    def _serving(self) -> list[RunningServer]:
        return [s for s in self.fleet.running() if s.version == self._policy_version]

    def _update_weights(self, behind: Sequence[RunningServer], version: int) -> None:
        with self.fleet.publishing(behind):
            connected = [server for server in behind if self._connects(server)]
            failures = self.channels.publish(connected, version)
            for server in connected:
                if server in failures:
                    self.fleet.fail(server, failures[server])
                else:
                    self.fleet.set_version(server, version)

    def _connects(self, server: RunningServer) -> bool:
        """Whether a channel to the server is open; a server that does not answer is taken out of service."""
        self.while_waiting()
        try:
            self.channels.open(server)
        except ServerError as error:
            self.fleet.fail(server, error)
            return False
        return True

    def release_gpus(self) -> None:
        """Put servers that share GPUs with training to sleep, unless requests are in flight."""
        if not self.sleeps or self._asleep or self.fleet.num_unfinished():
            return
        if self.workers is not None and self.workers.num_unfinished():
            return
        # a server that starts during training would take its memory
        self._may_restart = False
        self.fleet.pause_starts(True)
        self._wait_until(lambda: not self.fleet.num_starting())
        for server in self.fleet.running():
            try:
                self.channels.sleep(server)
                self.fleet.set_version(server, None)
            except ServerError as error:
                self.fleet.fail(server, error)
        self._asleep = True

    def _wake(self) -> None:
        """Prepare for servers to wake up, which they do when they next receive weights."""
        if self._asleep:
            self.make_room()
            self._asleep, self._may_restart = False, True
            self.fleet.pause_starts(False)


def _answer_soon(calls: Sequence[PendingCall], future: Future[list[ModelCall]]) -> None:
    """Schedule `_answer` in the calls' event loop. Called in the fleet's thread."""
    loop = calls[0].result.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(_answer, calls, future)


def _answer(calls: Sequence[PendingCall], future: Future[list[ModelCall]]) -> None:
    answer_calls(calls, future.exception() or future.result())


def _wake_up(loop: asyncio.AbstractEventLoop) -> None:
    """Wake the event loop up, so that `advance` is called. Called in the fleet's thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None)


async def _unless_server_fails(groups: Sequence[Awaitable[RolloutGroup]]) -> list[RolloutGroup] | ServerError:
    """Wait for the groups of one server, or for its failure."""
    try:
        return await asyncio.gather(*groups)
    except ServerError as error:
        return error
