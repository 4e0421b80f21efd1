"""Records of a training step: batches, micro-batches, and the inputs and outputs of losses.

S input tokens of a micro-batch, T loss tokens (those trained on), N trajectories of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from torch import Tensor

from cohort.packing.segments import AttentionMetadata
from cohort.records import TrainSequence, sequences_from_arrays, sequences_to_arrays

Sequences = tuple[TrainSequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A packed row of sequences without padding. Sequences of a group may share its prompt.

    The last token of a sequence predicts nothing, so it is not an input.
    """

    input_ids: Tensor  # [S] int64
    position_ids: Tensor  # [S] int64, position of each token in its own sequence
    input_counts: Tensor  # [S] int64, number of sequences that have the token as input: several in a shared prefix,
    # 0 for a token that only fills the row
    attn_metadata: AttentionMetadata  # which tokens attend to which
    logit_positions: Tensor  # [T] int64, position in the row that predicts loss token t; if the row continues a cached
    # prefix, position 0 is the last token of the prefix, and those of the row follow
    labels: Tensor  # [T] int64, token ids of the loss tokens
    sampling_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_weights: Tensor  # [T] fixed for the whole step
    returns: Tensor  # [T], for a critic; [0] if the sequences have none
    trajectory_ids: Tensor  # [T] int64, 0 .. N - 1: trajectory of the micro-batch that the token belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of a step, on the host. All ranks have the same number of `micro_batches`."""

    micro_batches: tuple[Sequences, ...]  # each within the token budget; may be empty
    split_groups: tuple[tuple[Sequences, ...], ...] = ()  # groups in parts, each within the budget with its prompt
    micro_batch_tokens: int  # the budget
    num_trajectories: int  # in the step, over all ranks
    num_loss_tokens: int  # in the step, over all ranks
    num_over_budget: int  # sequences, or trajectories kept whole, that exceed the budget; each has its own micro-batch
    sequence_level: bool = True  # keep all sequences of a trajectory in one micro-batch

    @property
    def all_micro_batches(self) -> tuple[Sequences, ...]:
        """All micro-batches, those of split groups included."""
        return (*(part for group in self.split_groups for part in group), *self.micro_batches)

    @property
    def sequences(self) -> Sequences:
        """All sequences of this rank."""
        return tuple(s for micro_batch in self.all_micro_batches for s in micro_batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all sequences together, with the number in each micro-batch."""
        sizes = [[len(part) for part in group] for group in (*self.split_groups, self.micro_batches)]
        names = (f.name for f in fields(self) if f.name not in ("micro_batches", "split_groups"))
        numbers = {name: getattr(self, name) for name in names}
        return _from_message, (sequences_to_arrays(self.sequences), sizes, numbers)


def _from_message(message: tuple[Any, ...], sizes: Sequence[Sequence[int]], numbers: Mapping[str, Any]) -> TrainBatch:
    sequences = sequences_from_arrays(*message)  # in the order of `TrainBatch.sequences`
    *split_groups, micro_batches = (tuple(tuple(islice(sequences, size)) for size in group) for group in sizes)
    return TrainBatch(micro_batches=micro_batches, split_groups=tuple(split_groups), **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss, for one micro-batch."""

    logprobs: Tensor  # [T] current policy, with gradient
    old_logprobs: Tensor  # [T] policy at the first update of this rollout
    sampling_logprobs: Tensor  # [T] policy that sampled the tokens, as computed by the sampler
    reference_logprobs: Tensor | None  # [T] frozen reference policy; None if the loss has no KL term
    entropy: Tensor  # [T] in nats, current policy, with gradient
    advantages: Tensor  # [T]
    trajectory_ids: Tensor  # [T] int64, trajectory of each token, for sequence-level ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """Inputs of the critic's loss, for one micro-batch."""

    values: Tensor  # [T] current critic, with gradient
    old_values: Tensor  # [T] critic at the first update of this rollout
    returns: Tensor  # [T] targets of the values


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Output of a loss: unreduced per-token losses, and metrics to average over the tokens of the step."""

    per_token_loss: Tensor  # [T]
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [T], detached


# With `gradients_in_forward` it is called with some consecutive tokens at a time, so the loss of a token must not
# depend on the logprob of another.
PolicyLoss = Callable[[LossInputs], LossOutput]
