"""The rollout engine protocol, its request and result types, and the queue of calls that wait for an engine.

K context tokens and C sampled tokens of one model call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cohort.config import SamplingConfig
from cohort.records import FinishReason, FloatArray, IntArray, ModelCall, Prompt, as_float32

Purpose = Literal["train", "eval", "parity"]
_PURPOSES = {"train": 0, "eval": 1, "parity": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of completions. A token's logits go through them in this order, as in vLLM:

    repetition penalty, temperature, min-p, top-k, top-p.
    """

    num_generations: int  # per prompt
    max_completion_tokens: int  # per call
    repetition_penalty: float = 1.0  # 1 is off
    temperature: float  # 0 is greedy
    min_p: float = 0.0  # 0 is off
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    stop: tuple[str, ...] = ()  # strings that end a call; see `stop_strings`

    @classmethod
    def for_training(cls, rollout: SamplingConfig) -> Self:
        """Return the sampling parameters of training completions."""
        return cls(
            num_generations=rollout.num_generations,
            max_completion_tokens=rollout.max_completion_tokens,
            repetition_penalty=rollout.repetition_penalty,
            temperature=rollout.temperature,
            min_p=rollout.min_p,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            stop=rollout.stop,
        )

    @property
    def distribution(self) -> tuple[float, ...]:
        """The parameters of a token's distribution. Calls in which they are equal can be sampled in one batch."""
        return self.repetition_penalty, self.temperature, self.min_p, self.top_k, self.top_p

    def unmodified(self) -> Self:
        """Return the parameters with which tokens are sampled from the policy itself, at its temperature."""
        return replace(self, repetition_penalty=1.0, min_p=0.0, top_k=0, top_p=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """The part of `CallKey` that all calls of a step share."""

    purpose: Purpose
    seed: int
    step: int

    def call(self, prompt: Prompt, index: int, turn: int = 0) -> "CallKey":
        """Return the key of a model call.

        Args:
            prompt: prompt of the trajectory.
            index: index of the trajectory in its group.
            turn: number of earlier calls of the trajectory.
        """
        return CallKey(
            purpose=self.purpose,
            seed=self.seed,
            step=self.step,
            epoch=prompt.epoch,
            prompt_id=prompt.id,
            index=index,
            turn=turn,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """Identifies the random stream of a model call, which depends on neither batch nor rank."""

    purpose: Purpose
    seed: int
    step: int
    epoch: int
    prompt_id: int
    index: int
    turn: int = 0

    @property
    def prompt_seed(self) -> tuple[int, ...]:
        """The part that the trajectories of a group share, as entropy for a `SeedSequence`."""
        return _PURPOSES[self.purpose], self.seed, self.step, self.epoch, self.prompt_id

    @property
    def turn_seed(self) -> tuple[int, ...]:
        """Additional entropy for turns after the first."""
        return (self.turn,) if self.turn else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Model calls that share a context, which is prefilled once."""

    token_ids: IntArray  # [K]
    sampling: SamplingParams
    keys: tuple[CallKey, ...]  # one per call


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """The sampled tokens of one model call."""

    token_ids: IntArray  # [C] includes the end-of-sequence token, if any
    sampling_logprobs: FloatArray  # [C]
    finish_reason: FinishReason
    text: str | None = None  # without special tokens; None: not decoded

    def model_call(self, context_ids: IntArray, *, policy_version: int, trained: bool = True) -> ModelCall:
        """Return the model call with this completion."""
        return ModelCall(
            context_ids=context_ids,
            token_ids=self.token_ids,
            sampling_logprobs=self.sampling_logprobs,
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            trained=trained,
            text=self.text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCompletions:
    """A rank's completions as few arrays, for a message: N completions of T tokens in all."""

    token_ids: NDArray[np.int32]  # [T]
    sampling_logprobs: FloatArray  # [T] float32, if that is exact
    lengths: NDArray[np.int64]  # [N]
    finish_reasons: tuple[FinishReason, ...]  # [N]
    texts: tuple[str | None, ...]  # [N]

    @classmethod
    def of(cls, completions: "Sequence[SampledCompletion | ModelCall]") -> Self:
        """Pack completions."""
        empty = np.zeros(0, np.int32)
        return cls(
            token_ids=np.concatenate([empty, *(c.token_ids for c in completions)], dtype=np.int32, casting="same_kind"),
            sampling_logprobs=as_float32(
                np.concatenate([np.zeros(0, np.float32), *(c.sampling_logprobs for c in completions)])
            ),
            lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int64),
            finish_reasons=tuple(c.finish_reason for c in completions),
            texts=tuple(c.text for c in completions),
        )

    def unpack(self) -> list[SampledCompletion]:
        """Return the completions, whose arrays are views of those of all."""
        bounds = pairwise([0, *np.cumsum(self.lengths).tolist()])
        return [
            SampledCompletion(
                token_ids=self.token_ids[start:end],
                sampling_logprobs=self.sampling_logprobs[start:end],
                finish_reason=reason,
                text=text,
            )
            for (start, end), reason, text in zip(bounds, self.finish_reasons, self.texts, strict=True)
        ]


# Type of `RolloutEngine.generate`, the only method that rollout functions call.
Generate = Callable[[IntArray, SamplingParams, CallKey], Awaitable[ModelCall]]


class RolloutEngine(Protocol):
    """Samples from the current policy. All methods are called in the training thread."""

    def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> Awaitable[ModelCall]:
        """Sample a continuation of `token_ids` [K]. A future is collected faster than a coroutine, but must not fail.

        Concurrent calls may be batched; those with equal `token_ids` are prefilled once. Tokens after a stop string of
        `sampling` are cut by the caller (`cut_at_stop`), so that an engine may sample a few more, or ignore it.

        Raises:
            UserError: the context cannot be sampled from.
            TrainingError: the engine failed.
        """
        ...

    def advance(self) -> bool:
        """Work on waiting calls. Called whenever no coroutine can run, and at least twice a second.

        Returns:
            Whether coroutines may be able to continue.

        Raises:
            TrainingError: the engine failed.
        """
        ...

    def release_gpus(self) -> None:
        """Free GPUs that are shared with training, unless calls are in flight. Called when a wait ends."""
        ...

    def update_weights(self, *, policy_version: int) -> None:
        """From now on, sample with the trainer's current weights and label tokens `policy_version`."""
        ...

    def close(self) -> None:
        """Stop everything that the engine has started. Calls in flight are not answered."""
        ...


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

    def put(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> "asyncio.Future[ModelCall]":
        """Queue a call and return its result to wait for. Called in a coroutine."""
        result: asyncio.Future[ModelCall] = asyncio.get_running_loop().create_future()
        context = np.asarray(token_ids, dtype=np.int64)  # engines compare contexts by their bytes
        self._calls.append(PendingCall(token_ids=context, sampling=sampling, key=key, result=result))
        return result

    def take(self) -> list[PendingCall]:
        """Remove all calls and return those that were not cancelled."""
        calls, self._calls = self._calls, []
        return [call for call in calls if not call.result.done()]
