"""Rollout engines of the tests: one that answers by a script, and one that samples in a thread as a server does."""

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from cohort.policy import Policy, end_token_ids
from cohort.records import Completion, Prompt, RolloutGroup
from cohort.rollout import LocalEngine, Prefetcher, Sampler, SamplingParams, StreamKey
from waiting import PATIENCE_S


class ScriptedEngine:
    """Each group is there after so many turns of waiting, sampled from the weights at the time of asking."""

    def __init__(self, turns: Callable[[], int], *, version: int = 0):
        self._turns = turns
        self._version = version
        self._left: dict[Future[RolloutGroup], tuple[int, RolloutGroup]] = {}
        self.asked: list[tuple[int, int, int]] = []  # step of the key, prompt, epoch

    @property
    def num_out(self) -> int:
        """Groups asked for that are not there."""
        return len(self._left)

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[Future[RolloutGroup]]:
        groups: list[Future[RolloutGroup]] = [Future() for _ in prompts]
        for group, prompt in zip(groups, prompts, strict=True):
            self.asked.append((key.step, prompt.id, prompt.epoch))
            done = Completion(
                token_ids=np.array([1]),
                sampling_logprobs=np.zeros(1),
                finish_reason="stop",
                policy_version=self._version,
                text="",
            )
            self._left[group] = (self._turns(), RolloutGroup(prompt=prompt, completions=(done,)))
        return groups

    def wait(self, groups: Sequence[Future[RolloutGroup]], *, count: int) -> None:
        assert count <= len(groups)
        while sum(group.done() for group in groups) < count:
            self.turn()

    def turn(self) -> None:
        """As if one was waited for."""
        self._left = {future: (turns - 1, group) for future, (turns, group) in self._left.items()}
        for future, (turns, group) in [*self._left.items()]:
            if turns <= 0:
                del self._left[future]
                future.set_result(group)

    def load_weights(self, *, policy_version: int) -> None:
        self._version = policy_version

    def close(self) -> None:
        pass


class ThreadEngine:
    """Samples in a thread, from weights of its own that are the trainer's as of the last `load_weights`.

    One prompt in `one_in` is slow: its group is held back until weights were loaded twice, or nothing else is left to
    wait for.
    """

    def __init__(self, policy: Policy, tokenizer: Any, *, max_num_seqs: int = 64, one_in: int = 4):
        self._trained = policy
        self._policy = copy.deepcopy(policy)
        sampler = Sampler(self._policy, end_token_ids=end_token_ids(policy, tokenizer), max_num_seqs=max_num_seqs)
        self._engine = LocalEngine(sampler.sample, tokenizer)
        self._one_in = one_in
        self._weights = threading.Lock()
        self._changed = threading.Condition()
        self._num_computing = 0
        self._num_loaded = 0
        self._held_back: list[tuple[int, Future[RolloutGroup], RolloutGroup]] = []
        self._asked: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[Future[RolloutGroup]]:
        groups: list[Future[RolloutGroup]] = [Future() for _ in prompts]
        with self._changed:
            self._num_computing += len(prompts)
        for prompt, group in zip(prompts, groups, strict=True):
            self._asked.put((prompt, sampling, key, group))
        return groups

    def wait(self, groups: Sequence[Future[RolloutGroup]], *, count: int) -> None:
        with self._changed:
            while sum(group.done() for group in groups) < count:
                if self._num_computing == 0:
                    self._let_go(self._held_back[:1])
                else:
                    assert self._changed.wait(timeout=PATIENCE_S)

    def load_weights(self, *, policy_version: int) -> None:
        with self._weights:
            self._policy.model.load_state_dict(self._trained.model.state_dict())
            self._engine.load_weights(policy_version=policy_version)
        with self._changed:
            self._num_loaded += 1
            self._let_go([entry for entry in self._held_back if entry[0] <= self._num_loaded])

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            prompt, sampling, key, future = asked
            with self._weights:
                (group,) = (done.result() for done in self._engine.submit([prompt], sampling, key))
            with self._changed:
                self._num_computing -= 1
                self._held_back.append((self._num_loaded + 2, future, group))
                if prompt.id % self._one_in:
                    self._let_go(self._held_back[-1:])
                self._changed.notify_all()

    def _let_go(self, entries: list[tuple[int, Future[RolloutGroup], RolloutGroup]]) -> None:
        for entry in entries:
            self._held_back.remove(entry)
            entry[1].set_result(entry[2])


def sample_in_a_thread(patch: Callable[[str, Any], None], *, max_staleness: int, drop_stale: bool = False) -> None:
    """Let runs of `engine: local` have an engine that goes on while they train.

    Args:
        patch: sets an attribute by its full name.
        max_staleness: as the configuration of an engine that can run ahead has it.
        drop_stale: likewise.
    """

    def prefetcher(*args: Any, **options: Any) -> Prefetcher:
        return Prefetcher(*args, **{**options, "max_staleness": max_staleness, "drop_stale": drop_stale})

    def engine(sample: Any, tokenizer: Any) -> ThreadEngine:
        return ThreadEngine(sample.args[0].local.policy, tokenizer)  # of the workers that sample

    patch("cohort.trainer.gather.Prefetcher", prefetcher)
    patch("cohort.trainer.setup.LocalEngine", engine)
