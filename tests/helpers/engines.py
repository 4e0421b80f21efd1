"""Rollout engines of the tests: one that answers by a script, and one that samples in a thread as a server does."""

import asyncio
import copy
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from cohort.models import Policy, end_token_ids
from cohort.models.packed_weights import has_packed_products
from cohort.records import IntArray, ModelCall, Prompt, RolloutGroup
from cohort.rollout import (
    CallKey,
    Prefetcher,
    RolloutCollector,
    RolloutEngine,
    SampledCompletion,
    Sampler,
    SampleRequest,
    SamplingParams,
    StepKey,
)
from cohort.rollout.engines.base import CallQueue, PendingCall
from tiny import make_tokenizer

PACKS_BFLOAT16 = pytest.mark.skipif(
    not has_packed_products(torch.bfloat16), reason="oneDNN multiplies in bfloat16 only on CPUs with AVX-512"
)


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams, key: StepKey
) -> list[RolloutGroup]:
    """One group per prompt, by a collector that ends with it."""
    with closing(RolloutCollector(engine, make_tokenizer())) as collector:
        return collector.collect(prompts, sampling, key)


class ScriptedEngine:
    """Each group is there after so many turns of waiting, sampled from the weights at the time of asking."""

    def __init__(self, turns: Callable[[], int], *, version: int = 0):
        self._turns = turns
        self._version = version
        # calls of a prompt, by epoch and id, with the turns that are left
        self._left: dict[tuple[int, int], tuple[int, list[asyncio.Future[ModelCall]]]] = {}
        self.asked: list[tuple[int, int, int]] = []  # step of the key, prompt, epoch

    @property
    def num_out(self) -> int:
        """Groups asked for that are not there."""
        return len(self._left)

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        if key.index == 0:
            self.asked.append((key.step, key.prompt_id, key.epoch))
            self._left[key.epoch, key.prompt_id] = (self._turns(), [])
        done: asyncio.Future[ModelCall] = asyncio.get_running_loop().create_future()
        self._left[key.epoch, key.prompt_id][1].append(done)
        version = self._version
        await done
        return ModelCall(
            context_ids=token_ids,
            token_ids=np.array([1]),
            sampling_logprobs=np.zeros(1),
            finish_reason="stop",
            policy_version=version,
        )

    def advance(self) -> bool:
        is_asked = bool(self._left)
        self.turn()
        return is_asked  # else the collector waits, instead of taking a core from what it waits for

    def turn(self) -> None:
        """As if one was waited for."""
        self._left = {prompt: (turns - 1, calls) for prompt, (turns, calls) in self._left.items()}
        for prompt, (turns, calls) in [*self._left.items()]:
            if turns <= 0:
                del self._left[prompt]
                for call in calls:
                    call.set_result(None)  # type: ignore[arg-type]

    def release_gpus(self) -> None:
        pass

    def update_weights(self, *, policy_version: int) -> None:
        self._version = policy_version

    def close(self) -> None:
        pass


class ThreadEngine:
    """Samples in a thread, from weights of its own that are the trainer's as of the last `update_weights`.

    One prompt in `one_in` is slow: its group is held back until weights were loaded twice, or nothing else is left to
    wait for.
    """

    def __init__(self, policy: Policy, tokenizer: Any, *, max_num_seqs: int = 64, one_in: int = 4):
        self._trained = policy
        self._policy = copy.deepcopy(policy)
        self._sampler = Sampler(self._policy, end_token_ids=end_token_ids(policy, tokenizer), max_num_seqs=max_num_seqs)
        self._policy_version = 0
        self._one_in = one_in
        self._weights = threading.Lock()
        self._calls = CallQueue()
        self._num_computing = 0  # groups
        self._num_loaded = 0
        self._held_back: list[tuple[int, list[PendingCall], list[SampledCompletion], int]] = []
        self._asked: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        return await self._calls.put(token_ids, sampling, key)

    def advance(self) -> bool:
        groups: dict[tuple[int, int], list[PendingCall]] = {}
        for call in self._calls.take():
            groups.setdefault((call.key.epoch, call.key.prompt_id), []).append(call)
        self._num_computing += len(groups)
        for calls in groups.values():
            self._asked.put(calls)
        if not groups and self._num_computing == 0 and self._held_back:
            self._let_go(self._held_back[:1])
            return True
        return bool(groups)

    def release_gpus(self) -> None:
        pass

    def update_weights(self, *, policy_version: int) -> None:
        with self._weights:
            self._policy.model.load_state_dict(self._trained.model.state_dict())
            self._policy_version = policy_version
        self._num_loaded += 1
        self._let_go([entry for entry in self._held_back if entry[0] <= self._num_loaded])

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (calls := self._asked.get()) is not None:
            request = SampleRequest(
                token_ids=calls[0].token_ids, sampling=calls[0].sampling, keys=tuple(call.key for call in calls)
            )
            with self._weights:
                version = self._policy_version
                group = self._sampler.sample([request])
            calls[0].result.get_loop().call_soon_threadsafe(self._sampled, calls, group, version)

    def _sampled(self, calls: list[PendingCall], group: list[SampledCompletion], version: int) -> None:
        self._num_computing -= 1
        self._held_back.append((self._num_loaded + 2, calls, group, version))
        if calls[0].key.prompt_id % self._one_in:
            self._let_go(self._held_back[-1:])

    def _let_go(self, entries: list[tuple[int, list[PendingCall], list[SampledCompletion], int]]) -> None:
        for entry in entries:
            self._held_back.remove(entry)
            for call, completion in zip(entry[1], entry[2], strict=True):
                call.answer(completion.model_call(call.token_ids, policy_version=entry[3]))


def sample_in_a_thread(patch: Callable[[str, Any], None], *, max_staleness: int, drop_stale: bool = False) -> None:
    """Let runs of `engine: local` have an engine that goes on while they train.

    Args:
        patch: sets an attribute by its full name.
        max_staleness: as the configuration of an engine that can run ahead has it.
        drop_stale: likewise.
    """

    def prefetcher(*args: Any, **options: Any) -> Prefetcher:
        return Prefetcher(*args, **{**options, "max_staleness": max_staleness, "drop_stale": drop_stale})

    def engine(sample: Any) -> ThreadEngine:
        worker = sample.__self__.workers.local  # of `TrainingWorkers.sample`
        return ThreadEngine(worker.policy, worker.tokenizer)

    patch("cohort.trainer.collect_groups.Prefetcher", prefetcher)
    patch("cohort.rollout.engines.local.setup.LocalEngine", engine)
