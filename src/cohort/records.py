"""The host-side records of one step, in the order in which they come to be. No tensors here.

Each record is frozen and adds knowledge to the one before it. Tokens are the only record of what was said: text is a
view of them, and nothing is tokenised a second time.

G generations of one prompt, K context tokens and C completion tokens of a model call, S tokens of prompt and completion
together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Message = Mapping[str, Any]
FinishReason = Literal["stop", "length"]
Estimate = Literal["logprobs", "entropies", "reference_logprobs", "values"]  # the fields of `Estimates`


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the dataset, ready to be sampled from."""

    id: int  # row number in the dataset
    epoch: int  # how often the dataset had been passed through before this visit
    content: str | Sequence[Message]  # the prompt column as the user wrote it; rewards see this
    token_ids: IntArray  # [P] after the chat template
    columns: Mapping[str, Any]  # the row's other columns, passed to the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of the policy: exact tokens in, exact tokens out."""

    context_ids: IntArray  # [K] everything the model saw
    token_ids: IntArray  # [C] what it sampled, with the end-of-turn token if it produced one
    sampling_logprobs: FloatArray  # [C] under the distribution sampled from
    finish_reason: FinishReason
    policy_version: int  # optimizer steps done when the oldest token was sampled
    trained: bool = True  # False for a simulated user or an opponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer."""

    token_ids: IntArray  # [C] includes the end-of-sequence token when there is one
    sampling_logprobs: FloatArray  # [C] under the distribution that was sampled from (temperature, top-p, top-k)
    finish_reason: FinishReason  # "stop": an end-of-sequence token; "length": the token limit
    policy_version: int  # optimizer steps behind the weights that sampled it, at its oldest token
    text: str  # view of token_ids without special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """A cohort: one prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A cohort with its rewards. NaN means "not judged"."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # [G]
    rewards: FloatArray  # [G] weighted sum of the parts that judged the completion; NaN if none did
    reward_parts: Mapping[str, FloatArray]  # name -> [G], unweighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What models say of a step's completions before any of them is trained on, [C] each by the sequence's index.

    Empty where the algorithm does not ask for it.
    """

    logprobs: Mapping[int, FloatArray] = field(default_factory=dict)  # of the policy
    entropies: Mapping[int, FloatArray] = field(default_factory=dict)  # of the policy, in nats
    reference_logprobs: Mapping[int, FloatArray] = field(default_factory=dict)
    values: Mapping[int, FloatArray] = field(default_factory=dict)  # of the critic: the return that it expects


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One completion after its prompt, as the loss sees it. P prompt tokens, C completion tokens."""

    token_ids: IntArray  # [P + C]
    num_prompt_tokens: int  # P
    index: int  # number of the sequence in the step
    group: int  # number of the group in the step; sequences of one group have the same prompt
    sampling_logprobs: FloatArray  # [C]
    loss_weights: FloatArray  # [C] fixed over the whole step; 0 masks a token
    advantages: FloatArray  # [C] the same for all tokens where the completion has one
    # [C] what a critic is to say of each token; empty without one, and where it is to learn nothing from the completion
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))

    @property
    def num_completion_tokens(self) -> int:
        """C."""
        return len(self.token_ids) - self.num_prompt_tokens
