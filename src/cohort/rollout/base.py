"""What every rollout engine offers, and what it is told."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from cohort.records import FinishReason, FloatArray, IntArray, Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are sampled."""

    num_generations: int
    max_completion_tokens: int
    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """With (prompt, index) this names a completion's random stream; nothing else does, neither batch nor rank."""

    purpose: Literal["train", "eval", "parity"]
    seed: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Some of a prompt's completions: which ones decides their random streams."""

    prompt: Prompt
    indices: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens of one completion. C tokens."""

    token_ids: IntArray  # [C] includes the end-of-sequence token when there is one
    sampling_logprobs: FloatArray  # [C]
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Samples completions from the current policy. All methods are called from one thread, that of the loop."""

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[Future[RolloutGroup]]:
        """Begin to sample. One group per prompt, in the order of the prompts; what is not awaited goes on besides."""
        ...

    def wait(self, groups: Sequence[Future[RolloutGroup]], *, count: int) -> None:
        """Until `count` of these are there. An engine may need the calling thread's help to get on.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: the engine cannot go on.
        """
        ...

    def load_weights(self, *, policy_version: int) -> None:
        """Sample from the trainer's weights as they are now, known as `policy_version` from here on."""
        ...

    def close(self) -> None:
        """End what the engine has started. Groups that are not there yet never will be."""
        ...


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey
) -> list[RolloutGroup]:
    """One group per prompt, in the order of the prompts.

    Raises:
        UserError: a prompt cannot be sampled.
        TrainingError: the engine cannot go on.
    """
    groups = engine.submit(prompts, sampling, key)
    engine.wait(groups, count=len(groups))
    return [group.result() for group in groups]
