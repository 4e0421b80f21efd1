"""The `vllm` rollout engine: groups of completions from a fleet of servers that have the trainer's weights."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from cohort import stopping
from cohort.errors import TrainingError
from cohort.records import Prompt, RolloutGroup
from cohort.rollout.base import SamplingParams, StreamKey
from cohort.rollout.local import completions_of
from cohort.rollout.vllm.api import ServerError
from cohort.rollout.vllm.client import GeneratedGroup, GenerateRequest, requests_for
from cohort.rollout.vllm.fleet import Fleet
from cohort.rollout.vllm.servers import RunningServer

# How long to wait without looking whether the fleet's thread is still there.
_TICK_S = 0.5


class Channel(Protocol):
    """The way of weights to one server."""

    def sleep(self) -> None:
        """Have the server drop its weights and free its GPU memory until weights are published to it.

        Raises:
            ServerError: it did not.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds. The server may be gone."""
        ...


C = TypeVar("C", bound=Channel)


class VllmEngine(Generic[C]):
    """Submits to the fleet, and brings the weights to its servers.

    Weights are handed over in the thread that calls, since all training ranks take part: in `load_weights`, and in
    `wait` to servers that have come up since.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        tokenizer: Any,
        connect: Callable[[str], C],
        publish: Callable[[Sequence[C], int], Mapping[C, ServerError]],
        note: Callable[[str], None],
        while_waiting: Callable[[], None] = lambda: None,
        sleeps: bool = False,
        make_room: Callable[[], None] = lambda: None,
    ):
        """Use `fleet`, which ends with the engine.

        Args:
            fleet: of servers.
            tokenizer: gives the text of a completion.
            connect: opens the way of weights to the server at an address; may raise `ServerError`.
            publish: hands the trainer's weights, as this version of the policy, to servers; says which ones failed.
            note: told what a person should know, in the thread that calls.
            while_waiting: called every second or so of a wait.
            sleeps: servers share their GPUs with training, and sleep while nothing is sampled.
            make_room: called before they wake, to give back the GPU memory that training keeps for later.
        """
        self._fleet = fleet
        self._tokenizer = copy.deepcopy(tokenizer)  # texts are made in the fleet's thread
        self._connect = connect
        self._publish = publish
        self._note = note
        self._while_waiting = while_waiting
        self._sleeps = sleeps
        self._make_room = make_room
        self._asleep = False
        self._channels: dict[tuple[int, int], C] = {}  # by server and number of its start
        self._policy_version: int | None = None

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[Future[RolloutGroup]]:
        """Begin to sample; weights must have been loaded."""
        assert self._policy_version is not None, "nobody would ever be given work"
        self._wake()
        self._pump()
        return self._submit(prompts, sampling, key)

    def wait(self, groups: Sequence[Future[RolloutGroup]], *, count: int) -> None:
        """Until `count` of these are there. Servers that have come up get their weights meanwhile.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: no server is left, or a prompt makes one after the other fail.
        """
        self._wait_until(lambda: _num_done(groups) >= count)
        self._rest_if_idle()

    def load_weights(self, *, policy_version: int) -> None:
        """Hand the trainer's weights to all servers that are up; the others get them when they are.

        Raises:
            TrainingError: no server is left.
        """
        self._policy_version = policy_version
        self._fleet.aim(policy_version)
        self._wake()
        self._pump()

    def sample_on_each_server(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey
    ) -> dict[str, list[RolloutGroup]]:
        """The same prompts on every server, by its address: servers in their first start are waited for.

        A server that fails meanwhile is left out, but one at least is there.

        Raises:
            TrainingError: no server is left, or again and again none of them got through with it.
        """
        self._wake()
        for _ in range(self._fleet.limits.max_server_failures + 1):
            self._wait_until(self._all_serve)
            submitted = {s.url: self._submit(prompts, sampling, key, only=s) for s in self._serving()}
            for groups in submitted.values():
                self._wait_until(lambda groups=groups: _num_done(groups, may_fail=True) == len(groups))  # type: ignore[misc]
            sampled = {
                url: [group.result() for group in groups]
                for url, groups in submitted.items()
                if not any(group.exception() for group in groups)
            }
            if sampled:
                self._rest_if_idle()
                return sampled
        failures = [group.exception() for groups in submitted.values() for group in groups if group.exception()]
        raise TrainingError(f"every vLLM server has failed at the same few prompts again and again: {failures[0]}")

    def close(self) -> None:
        """End the fleet; groups that are not there fail with a `TrainingError`."""
        self._fleet.close()
        self._tell()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _submit(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey, only: RunningServer | None = None
    ) -> list[Future[RolloutGroup]]:
        parts: list[tuple[GenerateRequest, Future[GeneratedGroup]]] = []
        groups = []
        for prompt in prompts:
            requests = requests_for(prompt, sampling, key, max_num_seqs=self._fleet.limits.max_num_seqs)
            futures: list[Future[GeneratedGroup]] = [Future() for _ in requests]
            groups.append(_Group(prompt, sampling.num_generations, futures, self._tokenizer).whole)
            parts += zip(requests, futures, strict=True)
        # evaluation and comparisons are waited for by themselves; what is for later steps is not
        self._fleet.submit(parts, urgent=key.purpose != "train", only=only)
        return groups

    def _wait_until(self, there: Callable[[], bool]) -> None:
        self._pump()
        while not there():
            stopping.check()
            self._fleet.wait_for_change(_TICK_S)
            self._while_waiting()
            self._pump()

    def _pump(self) -> None:
        """What the fleet needs this thread for: weights for servers that are behind, notes, and an end with errors."""
        self._tell()
        self._fleet.check()
        if self._policy_version is None or self._asleep:
            return
        behind = [s for s in self._fleet.running() if s.version != self._policy_version]
        if behind:
            self._bring_up_to_date(behind, self._policy_version)
            self._tell()

    def _tell(self) -> None:
        for text in self._fleet.notes():
            self._note(text)

    def _all_serve(self) -> bool:
        """Whether none is on its way for the first time, and all that are up have the current weights."""
        if self._fleet.num_starting(first_time=True):
            return False
        running = self._fleet.running()  # asked after: what has come up in between is among them
        return bool(running) and all(s.version == self._policy_version for s in running)

    def _serving(self) -> list[RunningServer]:
        return [s for s in self._fleet.running() if s.version == self._policy_version]

    def _bring_up_to_date(self, behind: Sequence[RunningServer], version: int) -> None:
        with self._fleet.publishing(behind):
            servers: dict[C, RunningServer] = {}
            for server in behind:
                self._while_waiting()
                try:
                    servers[self._channel(server)] = server
                except ServerError as error:
                    self._fleet.fail(server, error)
            failures = self._publish(list(servers), version) if servers else {}
            for channel, server in servers.items():
                if channel in failures:
                    self._fleet.fail(server, failures[channel])
                else:
                    self._fleet.has(server, version)

    def _channel(self, server: RunningServer) -> C:
        """The one of this start of the server. May raise `ServerError`."""
        started = (server.index, server.num_starts)
        for other in [key for key in self._channels if key[0] == server.index and key != started]:
            self._channels.pop(other).close()
        if started not in self._channels:
            self._channels[started] = self._connect(server.url)
        return self._channels[started]

    def _rest_if_idle(self) -> None:
        """Servers that share their GPUs with training go to sleep, so that it finds the memory."""
        if not self._sleeps or self._asleep or self._fleet.num_unfinished():
            return
        # one that came up while training runs would take the memory from it
        self._fleet.hold_starts(True)
        self._wait_until(lambda: not self._fleet.num_starting())
        for server in self._fleet.running():
            try:
                self._channel(server).sleep()
                self._fleet.has(server, None)
            except ServerError as error:
                self._fleet.fail(server, error)
        self._asleep = True

    def _wake(self) -> None:
        """Servers that sleep wake when they are given weights, which those that are behind are next."""
        if self._asleep:
            self._make_room()
            self._asleep = False
            self._fleet.hold_starts(False)


class _Group:
    """The group of one prompt, whole once all of its requests are answered."""

    def __init__(self, prompt: Prompt, num_generations: int, parts: Sequence[Future[GeneratedGroup]], tokenizer: Any):
        self.whole: Future[RolloutGroup] = Future()
        self._prompt = prompt
        self._num_generations = num_generations
        self._parts = parts
        self._tokenizer = tokenizer
        for part in parts:
            part.add_done_callback(self._part_done)

    def _part_done(self, part: Future[GeneratedGroup]) -> None:
        """In the fleet's thread, which sets the parts one after the other."""
        if self.whole.done() or not (part.exception() or all(p.done() for p in self._parts)):
            return
        try:
            error = part.exception()
            if error:
                raise error
            self.whole.set_result(self._put_together([p.result() for p in self._parts]))
        except BaseException as error:  # no future may be left open
            self.whole.set_exception(error)

    def _put_together(self, answers: Sequence[GeneratedGroup]) -> RolloutGroup:
        sampled = [s for answer in answers for s in answer.completions]
        versions = [v for answer in answers for v in answer.policy_versions]
        completions = completions_of(sampled, policy_versions=versions, tokenizer=self._tokenizer)
        # one is enough where all are the same: greedy ones
        return RolloutGroup(prompt=self._prompt, completions=completions * (self._num_generations // len(completions)))


def _num_done(groups: Sequence[Future[RolloutGroup]], *, may_fail: bool = False) -> int:
    """How many are there. Raises what is in the way of one, but for the failure of its server where it may fail."""
    done = [group for group in groups if group.done()]
    for group in done:
        error = group.exception()
        if error and not (may_fail and isinstance(error, ServerError)):
            raise error
    return len(done)
