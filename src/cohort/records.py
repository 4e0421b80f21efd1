"""Host-side records of a step, in the order of the data flow. No tensors.

Records are frozen; each stage returns a new record that adds information. Tokens are the source of truth: text is a
view of them and is never tokenized again.

G trajectories of one prompt, K context tokens and C sampled tokens of a model call, L tokens of a training sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32 | np.int64]  # sampled tokens and training sequences may have token ids of 32 bits
FloatArray = NDArray[np.float32 | np.float64]  # logprobs are float32 where that is exact
BoolArray = NDArray[np.bool_]
Message = Mapping[str, Any]
FinishReason = Literal["stop", "length"]
EndReason = Literal["answer", "max_turns", "length", "timeout", "environment_error"]
BROKEN: tuple[EndReason, ...] = ("timeout", "environment_error")  # ended by infrastructure
ForwardOnlyField = Literal["logprobs", "entropies", "reference_logprobs", "values"]  # fields of `ForwardOnlyOutputs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the dataset as a tokenized prompt."""

    id: int  # row number in the dataset
    epoch: int  # completed passes over the dataset before this one
    content: str | Sequence[Message]  # the prompt column, as passed to rewards
    token_ids: IntArray  # [P] after the chat template
    columns: Mapping[str, Any]  # other columns of the row, passed to rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request to a rollout engine: exact token ids in and out."""

    context_ids: IntArray  # [K] all input tokens
    token_ids: IntArray  # [C] sampled tokens, including the end-of-turn token if sampled
    sampling_logprobs: FloatArray  # [C] under the sampling distribution
    finish_reason: FinishReason  # "stop": an end-of-sequence token; "length": the token limit
    policy_version: int  # optimizer steps done when the oldest token was sampled
    trained: bool = True  # False for a simulated user or an opponent
    text: str | None = None  # of `token_ids`, without special tokens, if the process that sampled them has decoded it


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Counts and times of a trajectory with turns."""

    tool_calls: int = 0
    tool_errors: int = 0  # calls of tools that raised, missed their deadline or do not exist
    malformed_calls: int = 0  # tool calls that could not be parsed
    rewritten: int = 0  # turns that the chat template started a new token sequence for
    masked_tokens: int = 0  # tokens after the first context that are not trained, such as tool results
    attempts: int = 1  # 1 plus the number of times that the environment failed and was replaced
    model_s: float = 0.0  # seconds in which at least one model call was waiting
    environment_s: float = 0.0  # all other seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Model calls of one trajectory of a group, and how they ended. A plain prompt has one call.

    C tokens sampled by the policy, over all trained calls.
    """

    calls: tuple[ModelCall, ...]  # at least one, unless the trajectory is broken
    messages: tuple[Message, ...]  # messages after the prompt, for display and rewards
    text: str  # text of the sampled tokens, without special tokens
    end: EndReason
    observation: str = ""  # text of the environment's `reset`, appended to the prompt
    rewards: Mapping[str, float] = field(default_factory=dict)  # given by the environment or the agent, by its name
    step_rewards: tuple[float, ...] = ()  # one per trained call, or empty
    metrics: Mapping[str, float] = field(default_factory=dict)  # given by the environment or the agent
    stats: TurnStats | None = None  # None for a plain prompt
    error: str | None = None  # of a broken trajectory
    environment: Any = None  # the environment instance, for reward functions; None if there is none

    def __post_init__(self) -> None:
        """Check that only broken trajectories have no model call."""
        if not self.calls and not self.is_broken:
            raise ValueError(
                f"a trajectory that ended with {self.end!r} must have at least one model call; without any, it can "
                f"only have ended with {' or '.join(map(repr, BROKEN))}"
            )

    @classmethod
    def single_turn(cls, call: ModelCall, *, text: str) -> "Trajectory":
        """Create the trajectory of a single call.

        Args:
            call: completion of the prompt.
            text: text of the sampled tokens.
        """
        end: EndReason = "answer" if call.finish_reason == "stop" else "length"
        return cls(calls=(call,), messages=({"role": "assistant", "content": text},), text=text, end=end)

    @property
    def is_broken(self) -> bool:
        """Whether infrastructure ended the trajectory. It is then counted, but neither scored nor trained on."""
        return self.end in BROKEN

    @property
    def trained_calls(self) -> tuple[ModelCall, ...]:
        """Calls to the policy that are trained on."""
        return tuple(call for call in self.calls if call.trained)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled by the policy, C."""
        return sum(len(call.token_ids) for call in self.calls if call.trained)

    @property
    def sampled_token_ids(self) -> IntArray:
        """Token ids sampled by the policy, [C]."""
        return _joined([call.token_ids for call in self.trained_calls], np.int64)

    @property
    def sampling_logprobs(self) -> FloatArray:
        """Sampling logprobs of `sampled_token_ids`, [C]."""
        return _joined([call.sampling_logprobs for call in self.trained_calls], np.float64)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the last trained call, or of the last call if none is trained. None without calls."""
        calls = self.trained_calls or self.calls
        return calls[-1].finish_reason if calls else None

    @property
    def policy_version(self) -> int | None:
        """Policy version of the oldest sampled token. None without calls."""
        return min((call.policy_version for call in self.trained_calls or self.calls), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """A cohort: one prompt with its G trajectories."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A cohort with its rewards. NaN means "not scored"."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]
    rewards: FloatArray  # [G] weighted sum of `reward_parts` that are not NaN; NaN if all are
    reward_parts: Mapping[str, FloatArray]  # name -> [G], unweighted
    reward_details: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)  # name -> [G], how it was scored
    answer: str | None = None  # the expected one, for readers of the completions; None if it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Part of a trajectory that forms one causal token sequence."""

    token_ids: IntArray  # [L]
    loss_mask: BoolArray  # [L] True where the policy sampled the token
    sampling_logprobs: FloatArray  # [C] of the tokens in the mask


def join_calls(calls: Sequence[ModelCall]) -> list[TokenSequence]:
    """Join the calls of a trajectory into causal sequences, such that each sampled token is trained once.

    A call extends the previous sequence if its context starts with all of that sequence's tokens. Otherwise the history
    was rewritten (a template dropped old reasoning, an agent summarized) or belongs to another conversation, and a new
    sequence starts. Trained tokens stay in the order in which they were sampled; the critic's returns depend on it.
    Untrained calls are only included as context of later calls.

    Args:
        calls: calls in chronological order.

    Returns:
        Sequences in the order of their calls. Each ends with a trained token.
    """
    joined: list[list[ModelCall]] = []
    for call in calls:
        if call.trained and joined and _continues(joined[-1][-1], call):
            joined[-1].append(call)
        elif call.trained:
            joined.append([call])
    return [_sequence_of(of_one) for of_one in joined]


def starts_with(token_ids: IntArray, prefix: IntArray) -> bool:
    """Whether `token_ids` starts with `prefix`."""
    # `np.array_equal` takes three times as long
    return len(token_ids) >= len(prefix) and not np.count_nonzero(token_ids[: len(prefix)] != prefix)


def common_length(one: IntArray, other: IntArray) -> int:
    """Number of leading tokens that are the same in both."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _continues(previous: ModelCall, call: ModelCall) -> bool:
    """Whether the context of a call starts with all tokens of another."""
    return starts_with(call.context_ids, previous.context_ids) and starts_with(
        call.context_ids[len(previous.context_ids) :], previous.token_ids
    )


def _sequence_of(calls: Sequence[ModelCall]) -> TokenSequence:
    """Join calls that continue each other into one sequence. The last context contains all earlier tokens."""
    token_ids = np.concatenate([calls[-1].context_ids, calls[-1].token_ids], dtype=np.int32, casting="same_kind")
    mask = np.zeros(len(token_ids), bool)
    for call in calls:
        mask[len(call.context_ids) : len(call.context_ids) + len(call.token_ids)] = True
    logprobs = np.concatenate([call.sampling_logprobs for call in calls])
    return TokenSequence(token_ids=token_ids, loss_mask=mask, sampling_logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOnlyOutputs:
    """Outputs of forward-only passes before training, by sequence index: [C], of its trained tokens.

    Only outputs that the algorithm needs are computed; the others are empty.
    """

    logprobs: Mapping[int, FloatArray] = field(default_factory=dict)  # by the policy
    entropies: Mapping[int, FloatArray] = field(default_factory=dict)  # of the policy's distributions, in nats
    reference_logprobs: Mapping[int, FloatArray] = field(default_factory=dict)
    values: Mapping[int, FloatArray] = field(default_factory=dict)  # expected returns, by the critic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One causal sequence of L tokens, with the inputs of the loss for its C trained tokens.

    A trajectory whose history was rewritten has several sequences. Arrays may be parts of those of many sequences, and
    one number for all tokens an array that repeats it (`np.broadcast_to`), so nobody writes to them.
    """

    token_ids: IntArray  # [L], at least 2
    loss_mask: BoolArray  # [L] True for trained tokens; never for the first token
    sampling_logprobs: FloatArray  # [C]
    advantages: FloatArray  # [C]
    loss_weights: FloatArray  # [C] fixed for the whole step
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))  # [C] targets of the critic; [0] without one
    shared_prefix_tokens: int  # leading tokens shared by the group, none of them trained; 0: none
    index: int  # index of the sequence in the step
    group: int  # index of the group in the step
    trajectory: int  # index of the trajectory in the step

    def __post_init__(self) -> None:
        """Check the invariants that packing relies on."""
        assert 0 <= self.shared_prefix_tokens < len(self.token_ids), "the shared prefix must be a proper prefix"
        num_after = np.count_nonzero(self.loss_mask[max(1, self.shared_prefix_tokens) :])
        assert num_after == np.count_nonzero(self.loss_mask), "the shared prefix must not be trained"
        assert num_after == len(self.sampling_logprobs) == len(self.advantages) == len(self.loss_weights)

    @property
    def num_loss_tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.sampling_logprobs)

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
        """Create the sequence of a prompt, shared by the group, and a trained completion.

        Args:
            prompt_ids: [P]
            completion_ids: [C]
            index: index of the sequence and of its trajectory.
            group: index of the group.
            sampling_logprobs: [C], or one number for all tokens; likewise for the other per-token fields.
            advantages: [C]
            loss_weights: [C]
            returns: [C]; None without a critic.
        """
        token_ids = np.concatenate([prompt_ids, completion_ids])

        def of_tokens(values: FloatArray | float) -> FloatArray:
            return np.broadcast_to(np.asarray(values, np.float64), len(completion_ids))

        return cls(
            token_ids=token_ids,
            loss_mask=np.arange(len(token_ids)) >= len(prompt_ids),
            sampling_logprobs=of_tokens(sampling_logprobs),
            advantages=of_tokens(advantages),
            loss_weights=of_tokens(loss_weights),
            returns=np.zeros(0) if returns is None else of_tokens(returns),
            shared_prefix_tokens=len(prompt_ids),
            index=index,
            group=group,
            trajectory=index,
        )


_PER_TOKEN = ("sampling_logprobs", "advantages", "loss_weights", "returns")
_Column = tuple[FloatArray, Sequence[int]]  # of all sequences, or [N, 1] if each repeats one number; and their sizes


def sequences_to_arrays(sequences: Sequence[TrainSequence]) -> tuple[Any, ...]:
    """Return sequences as few arrays, for a message: the arguments of `sequences_from_arrays`. Nothing is rounded.

    Of a group's sequences, only the first has the shared prefix.
    """
    token_ids, masks, numbers, sent = [], [], [], set()
    for s in sequences:
        prefix = s.group, s.shared_prefix_tokens
        token_ids.append(s.token_ids[s.shared_prefix_tokens if prefix in sent else 0 :])
        sent.add(prefix)
        end = s.loss_mask[len(s.token_ids) - s.num_loss_tokens :]
        masks.append(None if np.count_nonzero(end) == len(end) else np.packbits(s.loss_mask))
        numbers.append((len(s.token_ids), s.shared_prefix_tokens, s.index, s.group, s.trajectory))
    per_token = {name: _column([getattr(s, name) for s in sequences]) for name in _PER_TOKEN}
    return _concatenated(token_ids), masks, numbers, per_token


def sequences_from_arrays(
    token_ids: IntArray,
    masks: Sequence[NDArray[np.uint8] | None],
    numbers: Sequence[tuple[int, int, int, int, int]],
    per_token: Mapping[str, _Column],
) -> Iterator[TrainSequence]:
    """Yield the sequences that `sequences_to_arrays` was called with.

    Args:
        token_ids: of all sequences, without the prefixes that an earlier one has.
        masks: [N] loss masks as bits; None if the last tokens are trained.
        numbers: [N] tokens, shared prefix tokens, index, group and trajectory.
        per_token: the other fields by name.
    """
    prefixes: dict[tuple[int, int], IntArray] = {}
    columns = zip(*(_parts(*values) for values in per_token.values()), strict=True)
    start = 0
    for (length, num_shared, index, group, trajectory), bits, values in zip(numbers, masks, columns, strict=True):
        prefix = prefixes.get((group, num_shared), token_ids[:0])
        end = start + length - len(prefix)
        own = np.concatenate([prefix, token_ids[start:end]])
        start = end
        prefixes[group, num_shared] = own[:num_shared]
        is_trained = np.arange(length) >= length - len(values[0])
        yield TrainSequence(
            token_ids=own,
            loss_mask=is_trained if bits is None else np.unpackbits(bits, count=length).astype(bool),
            shared_prefix_tokens=num_shared,
            index=index,
            group=group,
            trajectory=trajectory,
            **dict(zip(per_token, values, strict=True)),
        )


def _column(arrays: Sequence[FloatArray]) -> _Column:
    is_repeated = arrays and all(values.strides == (0,) and len(values) for values in arrays)
    values = np.stack([values[:1] for values in arrays]) if is_repeated else _concatenated(arrays)
    return values, [*map(len, arrays)]


def _parts(values: FloatArray, sizes: Sequence[int]) -> Iterator[FloatArray]:
    if values.ndim == 2:
        return map(np.broadcast_to, values, sizes)
    return (values[start:end] for start, end in pairwise(accumulate(sizes, initial=0)))


def _concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Join arrays of a trajectory's calls; a single one is not copied."""
    return np.asarray(arrays[0], dtype) if len(arrays) == 1 else np.concatenate([np.zeros(0, dtype), *arrays])


def as_float32(values: FloatArray) -> FloatArray:
    """Return values in float32 if that is exact, bit for bit, else as they are."""
    if values.dtype == np.float32:
        return values
    single = values.astype(np.float32)
    is_exact = np.array_equal(single.astype(np.float64).view(np.int64), values.view(np.int64))  # -0 is not 0
    return single if is_exact else values
