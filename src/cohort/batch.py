"""The records of one step in training.

S input tokens of a micro-batch, T loss tokens (those that are trained), n trajectories of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from cohort.records import TrainSequence
from cohort.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences as one row without padding. Those of a group may share its prefix.

    The last token of a sequence predicts nothing and is not an input.
    """

    input_ids: Tensor  # [S] int64
    position_ids: Tensor  # [S] int64, of each token in its own sequence
    input_counts: Tensor  # [S] int64, number of sequences that the token is an input of: several in a shared prefix,
    # 0 in a token that only fills the row
    segments: Segments  # which tokens attend to which
    logit_positions: Tensor  # [T] int64, position in the row that predicts loss token t; if the row continues a prefix
    # computed before, position 0 is the prefix's last token, and the row's own follow
    targets: Tensor  # [T] int64, ids of the loss tokens
    sampling_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_weights: Tensor  # [T] fixed over the whole step
    returns: Tensor  # [T], for a critic; [0] of sequences that have none
    sequence_ids: Tensor  # [T] int64, 0 .. n - 1: which of the micro-batch's trajectories the token belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one rank computes in a step, on the host. Every rank has as many micro-batches; streams come besides."""

    micro_batches: tuple[tuple[TrainSequence, ...], ...]  # each under the token budget; an empty one keeps step
    streams: tuple[tuple[tuple[TrainSequence, ...], ...], ...] = ()  # groups in parts, each under it with its prompt
    micro_batch_tokens: int  # the budget
    num_trajectories: int  # of the step, over all ranks
    num_loss_tokens: int  # of the step, over all ranks
    num_over_budget: int  # sequences, or trajectories kept whole, over the budget; each is alone in its micro-batch
    whole_trajectories: bool = True  # all sequences of a trajectory are in one micro-batch

    @property
    def pieces(self) -> tuple[tuple[TrainSequence, ...], ...]:
        """What is computed together: micro-batches and parts of streams."""
        return (*(part for stream in self.streams for part in stream), *self.micro_batches)

    @property
    def sequences(self) -> tuple[TrainSequence, ...]:
        """All of this rank's."""
        return tuple(s for piece in self.pieces for s in piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch at loss time."""

    logprobs: Tensor  # [T] current policy, carries the gradient
    old_logprobs: Tensor  # [T] the policy at the first update of this rollout
    sampling_logprobs: Tensor  # [T] the policy that sampled the tokens, as the sampler computed them
    reference_logprobs: Tensor | None  # [T] the frozen reference; None where the loss has no KL term
    entropy: Tensor  # [T] in nats, of the current policy's distribution; carries a gradient
    advantages: Tensor  # [T]
    sequence_ids: Tensor  # [T] int64, trajectory that a token belongs to, for sequence-level ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """One micro-batch at the time of the critic's loss."""

    values: Tensor  # [T] of the current critic, carry the gradient
    old_values: Tensor  # [T] of the critic at the first update of this rollout
    returns: Tensor  # [T] what they are to be


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss returns: a loss per token, not reduced, and numbers to average over the step's tokens."""

    per_token_loss: Tensor  # [T]
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [T], detached


# With gradients in forward it gets some consecutive tokens at a time: a token's loss depends on no other's logprob.
PolicyLoss = Callable[[LossInputs], LossOutput]
