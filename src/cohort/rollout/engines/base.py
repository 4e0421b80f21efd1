"""The rollout engine protocol, and how sampling and random streams are described to engines.

K context tokens and C sampled tokens of one model call.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from cohort.config import SamplingConfig
from cohort.records import FinishReason, FloatArray, IntArray, ModelCall, Prompt

Purpose = Literal["train", "eval", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are sampled."""

    num_generations: int  # of one prompt: the index of a call is below it
    max_completion_tokens: int  # of one call
    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off

    @classmethod
    def for_training(cls, rollout: SamplingConfig) -> Self:
        """How a run samples the completions that it trains on."""
        return cls(
            num_generations=rollout.num_generations,
            max_completion_tokens=rollout.max_completion_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """The part of a `CallKey` that all calls of a step have in common."""

    purpose: Purpose
    seed: int
    step: int

    def call(self, prompt: Prompt, index: int, turn: int = 0) -> "CallKey":
        """Key of a model call.

        Args:
            prompt: that the rollout began with.
            index: of the rollout among those of the prompt.
            turn: number of calls that the rollout has made before.
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
    """Names the random stream of a model call. Neither batch nor rank has an effect on the stream."""

    purpose: Purpose
    seed: int
    step: int
    epoch: int
    prompt_id: int
    index: int
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Model calls with the same context, which is prefilled once for all of them."""

    token_ids: IntArray  # [K]
    sampling: SamplingParams
    keys: tuple[CallKey, ...]  # one per call


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens of one completion."""

    token_ids: IntArray  # [C] includes the end-of-sequence token when there is one
    sampling_logprobs: FloatArray  # [C]
    finish_reason: FinishReason


# `RolloutEngine.generate`: all that a rollout needs of an engine.
Generate = Callable[[IntArray, SamplingParams, CallKey], Awaitable[ModelCall]]


class RolloutEngine(Protocol):
    """Samples from the current policy. All methods are called in the thread of the training loop."""

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        """Sample a continuation of `token_ids` [K].

        Calls that wait at the same time may be batched; those with equal `token_ids` are prefilled once.

        Raises:
            UserError: the context cannot be sampled from.
            TrainingError: the engine cannot go on.
        """
        ...

    def advance(self) -> bool:
        """Work on the calls that wait. Called whenever no coroutine can run, and at least twice a second.

        Returns:
            whether anything was done that may let a coroutine go on at once.

        Raises:
            TrainingError: the engine cannot go on.
        """
        ...

    def release_gpus(self) -> None:
        """Leave GPUs that are shared with training to it, unless calls are in flight. Called when a wait ends."""
        ...

    def load_weights(self, *, policy_version: int) -> None:
        """Sample from the trainer's weights as they are now, known as `policy_version` from here on."""
        ...

    def close(self) -> None:
        """Stop whatever the engine has started. Calls in flight are never answered."""
        ...
