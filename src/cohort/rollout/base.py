"""What every rollout engine offers, and what it is told."""

from collections.abc import Sequence
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

    purpose: Literal["train", "eval"]
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
    """Samples completions from the current policy."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[RolloutGroup]:
        """One group per prompt, in the order of the prompts."""
        ...

    def load_weights(self, *, policy_version: int) -> None:
        """Sample from the trainer's weights as they are now, known as `policy_version` from here on."""
        ...
