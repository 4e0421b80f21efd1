"""The host-side records of one step, in the order in which they come to be. No tensors here.

Each record is frozen and adds knowledge to the one before it. Tokens are the only record of what was said: text is a
view of them, and nothing is tokenised a second time.

G trajectories of one prompt, K context tokens and C sampled tokens of a model call, L tokens of a training sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Message = Mapping[str, Any]
FinishReason = Literal["stop", "length"]
EndReason = Literal["answer", "max_turns", "length", "timeout", "environment_error"]
BROKEN: tuple[EndReason, ...] = ("timeout", "environment_error")  # by infrastructure
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
    finish_reason: FinishReason  # "stop": an end-of-sequence token; "length": the token limit
    policy_version: int  # optimizer steps done when the oldest token was sampled
    trained: bool = True  # False for a simulated user or an opponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What one member of a group did: one model call or many. A plain prompt has one.

    C tokens that the policy sampled, over all trained calls.
    """

    calls: tuple[ModelCall, ...]  # at least one, unless the trajectory broke before
    messages: tuple[Message, ...]  # a readable view of what followed the prompt; never tokenized again
    text: str  # a readable view of the sampled tokens, without special tokens
    end: EndReason

    def __post_init__(self) -> None:
        """Refuse a trajectory that ended without a model call."""
        if not self.calls and not self.is_broken:
            raise ValueError(
                f"a trajectory that ended with {self.end!r} must have at least one model call; without any, it can "
                f"only have ended with {' or '.join(map(repr, BROKEN))}"
            )

    @classmethod
    def single_turn(cls, call: ModelCall, *, text: str) -> "Trajectory":
        """Make the trajectory of one call.

        Args:
            call: answers the prompt.
            text: of the tokens sampled.
        """
        end: EndReason = "answer" if call.finish_reason == "stop" else "length"
        return cls(calls=(call,), messages=({"role": "assistant", "content": text},), text=text, end=end)

    @property
    def is_broken(self) -> bool:
        """Whether infrastructure ended it: then it is counted, and neither scored nor trained on."""
        return self.end in BROKEN

    @property
    def trained_calls(self) -> tuple[ModelCall, ...]:
        """The policy's own calls."""
        return tuple(call for call in self.calls if call.trained)

    @property
    def token_ids(self) -> IntArray:
        """The tokens that the policy sampled, [C]."""
        return np.concatenate([np.zeros(0, np.int64), *(call.token_ids for call in self.trained_calls)])

    @property
    def sampling_logprobs(self) -> FloatArray:
        """Sampling logprobs of `token_ids`, [C]."""
        return np.concatenate([np.zeros(0), *(call.sampling_logprobs for call in self.trained_calls)])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the last call ended. None without calls."""
        return self.calls[-1].finish_reason if self.calls else None

    @property
    def policy_version(self) -> int | None:
        """Of the oldest token that the policy sampled. None without calls."""
        return min((call.policy_version for call in self.trained_calls or self.calls), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """A cohort: one prompt and what was done about it G times."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A cohort with its rewards. NaN means "not judged"."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]
    rewards: FloatArray  # [G] weighted sum of the parts that judged the trajectory; NaN if none did
    reward_parts: Mapping[str, FloatArray]  # name -> [G], unweighted


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens of a trajectory that form one causal sequence."""

    token_ids: IntArray  # [L]
    loss_mask: BoolArray  # [L] True where the policy sampled the token
    sampling_logprobs: FloatArray  # [L] 0 outside the mask


def token_sequences(calls: Sequence[ModelCall]) -> list[TokenSequence]:
    """Join the calls of a trajectory into few causal sequences in which each sampled token is trained once.

    A call continues the sequence of the call before it if its context begins with all of that sequence. Otherwise the
    history was rewritten (a template dropped old reasoning, an agent summarized) or another thread goes on, and a new
    sequence starts. So the trained tokens of all sequences, one after the other, are in the order in which they were
    sampled, as returns need them. Calls that are not trained are in no sequence, except as context that a later call
    has seen.

    Args:
        calls: in the order in which they were made.

    Returns:
        Sequences that end with a trained token, in the order of their calls.
    """
    sequences: list[TokenSequence] = []
    for call in calls:
        if not call.trained:
            continue
        if sequences and starts_with(call.context_ids, sequences[-1].token_ids):
            sequences[-1] = _extended(sequences[-1], call)
        else:
            sequences.append(_extended(_NOTHING, call))
    return sequences


_NOTHING = TokenSequence(token_ids=np.zeros(0, np.int64), loss_mask=np.zeros(0, bool), sampling_logprobs=np.zeros(0))


def starts_with(token_ids: IntArray, prefix: IntArray) -> bool:
    """Whether the first tokens are those of `prefix`."""
    return len(token_ids) >= len(prefix) and np.array_equal(token_ids[: len(prefix)], prefix)


def _extended(sequence: TokenSequence, call: ModelCall) -> TokenSequence:
    """Append the context tokens that are new, not trained, and the sampled tokens."""
    new = np.zeros(len(call.context_ids) - len(sequence.token_ids))
    sampled = np.ones(len(call.token_ids), dtype=bool)
    return TokenSequence(
        token_ids=np.concatenate([call.context_ids, call.token_ids]),
        loss_mask=np.concatenate([sequence.loss_mask, new.astype(bool), sampled]),
        sampling_logprobs=np.concatenate([sequence.sampling_logprobs, new, call.sampling_logprobs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Model outputs on a step's sequences before any of them is trained on: sequence index -> [L], 0 outside the mask.

    Empty if the algorithm does not ask for it.
    """

    logprobs: Mapping[int, FloatArray] = field(default_factory=dict)  # of the policy
    entropies: Mapping[int, FloatArray] = field(default_factory=dict)  # of the policy, in nats
    reference_logprobs: Mapping[int, FloatArray] = field(default_factory=dict)
    values: Mapping[int, FloatArray] = field(default_factory=dict)  # of the critic: expected return


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One causal token sequence with what the loss needs to know of each token. L tokens.

    Per-token fields are 0 outside the mask. A trajectory whose history was rewritten has several sequences.
    """

    token_ids: IntArray  # [L], at least 2
    loss_mask: BoolArray  # [L] True where the policy sampled the token and learns from it; never at the first token
    sampling_logprobs: FloatArray  # [L]
    advantages: FloatArray  # [L]
    loss_weights: FloatArray  # [L] fixed over the whole step
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))  # [L] targets of a critic; [0] if it has none
    shared_prefix_tokens: int  # leading tokens that the group's sequences share, none of them trained; 0: shares none
    index: int  # number of the sequence in the step
    group: int  # number of the group in the step
    trajectory: int  # number of the trajectory in the step

    def __post_init__(self) -> None:
        """Check the invariants that packing relies on."""
        assert 0 <= self.shared_prefix_tokens < len(self.token_ids), "a sequence is longer than its prefix"
        assert not self.loss_mask[: max(1, self.shared_prefix_tokens)].any(), "what the group shares is not trained"

    @property
    def num_loss_tokens(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @classmethod
    def single_turn(
        cls,
        prompt_ids: IntArray,
        completion_ids: IntArray,
        *,
        index: int,
        group: int,
        sampling_logprobs: FloatArray | float = 0.0,
        advantages: FloatArray | float = 0.0,
        loss_weights: FloatArray | float = 0.0,
        returns: FloatArray | float | None = None,
    ) -> "TrainSequence":
        """Make a sequence of a prompt that the group shares and a completion that is trained.

        Args:
            prompt_ids: [P]
            completion_ids: [C]
            index: of the sequence, and of its trajectory.
            group: of the sequence.
            sampling_logprobs: [C], as are the other per-token fields; or one number for all.
            advantages: [C]
            loss_weights: [C]
            returns: [C]; None without a critic.
        """
        token_ids = np.concatenate([prompt_ids, completion_ids])
        mask = np.arange(len(token_ids)) >= len(prompt_ids)
        return cls(
            token_ids=token_ids,
            loss_mask=mask,
            sampling_logprobs=scatter(mask, sampling_logprobs),
            advantages=scatter(mask, advantages),
            loss_weights=scatter(mask, loss_weights),
            returns=np.zeros(0) if returns is None else scatter(mask, returns),
            shared_prefix_tokens=len(prompt_ids),
            index=index,
            group=group,
            trajectory=index,
        )


def scatter(loss_mask: BoolArray, values: FloatArray | float) -> FloatArray:
    """Align values of the trained tokens with the sequence: [L], 0 outside the mask."""
    aligned = np.zeros(len(loss_mask))
    aligned[loss_mask] = values
    return aligned
