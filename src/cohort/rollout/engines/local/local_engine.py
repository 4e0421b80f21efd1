"""The `local` rollout engine: sample all waiting calls in one batch in the training processes."""

from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from cohort.records import IntArray, ModelCall
from cohort.rollout.engines.base import (
    CallKey,
    CallQueue,
    PendingCall,
    SampledCompletion,
    SampleRequest,
    SamplingParams,
)


def split_requests(requests: Sequence[SampleRequest], world_size: int) -> list[list[SampleRequest]]:
    """Return one list of requests per rank; their numbers of calls differ by at most one.

    Shares are consecutive: few contexts are prefilled on two ranks, and the ranks' completions only need concatenation.
    """
    total = sum(len(request.keys) for request in requests)
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    shares: list[list[SampleRequest]] = [[] for _ in range(world_size)]
    rank = position = 0
    for request in requests:
        left = request.keys
        while left:
            while position == bounds[rank + 1]:
                rank += 1
            taken = left[: bounds[rank + 1] - position]
            shares[rank].append(replace(request, keys=taken))
            position += len(taken)
            left = left[len(taken) :]
    return shares


Sample = Callable[[Sequence[SampleRequest]], list[SampledCompletion]]  # one per call, in order


class LocalEngine:
    """Answers model calls with the sampler of this process, or with those of all ranks."""

    def __init__(self, sample: Sample):
        """Create an engine from `Sampler.sample`, or from its counterpart on all ranks."""
        self._sample = sample
        self._calls = CallQueue()
        self._policy_version = 0

    def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> "Future[ModelCall]":
        """Sample a continuation of `token_ids` [K], batched with all waiting calls."""
        return self._calls.put(token_ids, sampling, key)

    def advance(self) -> bool:
        """Sample all waiting calls: one batch, unless they differ in purpose or in a token's distribution."""
        batches: dict[object, list[PendingCall]] = {}
        for call in self._calls.take():
            batches.setdefault((call.key.purpose, call.sampling.distribution), []).append(call)
        for calls in batches.values():
            self._answer(_by_context(calls))
        return bool(batches)

    def release_gpus(self) -> None:
        """Do nothing: no sampling is in progress when a wait ends."""

    def update_weights(self, *, policy_version: int) -> None:
        """Store the version; the weights are the trainer's own."""
        self._policy_version = policy_version

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def _answer(self, groups: Sequence[Sequence[PendingCall]]) -> None:
        """Sample groups of calls with the same context."""
        requests = [
            SampleRequest(
                token_ids=calls[0].token_ids, sampling=calls[0].sampling, keys=tuple(call.key for call in calls)
            )
            for calls in groups
        ]
        for call, completion in zip(chain.from_iterable(groups), self._sample(requests), strict=True):
            call.answer(completion.model_call(call.token_ids, policy_version=self._policy_version))


def _by_context(calls: Sequence[PendingCall]) -> list[list[PendingCall]]:
    """Group calls with equal context and sampling parameters, in order of the first of each group."""
    groups: dict[object, list[PendingCall]] = {}
    own: list[PendingCall] = []
    for call in calls:
        if not own or call.token_ids is not own[-1].token_ids or call.sampling is not own[-1].sampling:
            own = groups.setdefault((call.token_ids.tobytes(), call.sampling), [])
        own.append(call)
    return list(groups.values())
