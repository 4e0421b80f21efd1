"""Queue of model calls that wait for an engine."""

import asyncio
from dataclasses import dataclass

import numpy as np

from cohort.records import IntArray, ModelCall
from cohort.rollout.engines.base import CallKey, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingCall:
    """A model call, and the future that its coroutine awaits."""

    token_ids: IntArray  # [K] the context
    sampling: SamplingParams
    key: CallKey
    result: "asyncio.Future[ModelCall]"

    def answer(self, result: ModelCall) -> None:
        """Return the result to the coroutine, unless it was cancelled."""
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the coroutine, unless it was cancelled."""
        if not self.result.done():
            self.result.set_exception(error)


class CallQueue:
    """First-in, first-out queue of model calls."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._calls: list[PendingCall] = []

    async def put(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        """Queue a call and wait for its result."""
        result: asyncio.Future[ModelCall] = asyncio.get_running_loop().create_future()
        context = np.asarray(token_ids, dtype=np.int64)  # engines compare contexts by their bytes
        self._calls.append(PendingCall(token_ids=context, sampling=sampling, key=key, result=result))
        return await result

    def take(self) -> list[PendingCall]:
        """Remove all calls and return those that were not cancelled."""
        calls, self._calls = self._calls, []
        return [call for call in calls if not call.result.done()]
