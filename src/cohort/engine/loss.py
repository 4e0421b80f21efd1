"""The loss of a micro-batch: its logprobs, the policy loss over them, and what a step reports of both.

T loss tokens of a micro-batch, C of one sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cohort.batch import LossInputs, LossOutput, MicroBatch, PolicyLoss
from cohort.distributed import Ranks
from cohort.models import Policy, PrefixState
from cohort.records import TrainSequence

# What is counted, named as the fields of `TrainResult`.
COUNTS = (
    "num_inputs",
    "num_positions",
    "num_unshared_inputs",
    "num_prompt_inputs",
    "attention_pairs",
    "num_out_of_memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one pass over a step's batch gives besides the gradients. Counts are of all ranks."""

    metrics: Mapping[str, float]
    num_inputs: int  # tokens that were to be computed
    num_positions: int  # positions that were, padding included
    num_unshared_inputs: int  # tokens, if every sequence were computed whole
    num_prompt_inputs: int  # prompt tokens among the inputs
    attention_pairs: int  # of an input and one that it sees, itself included
    num_micro_batches: int  # of each rank, empty ones included
    num_out_of_memory: int  # micro-batches that did not fit


class Totals:
    """What is added up while a step's micro-batches are computed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to some of `COUNTS`."""
        for name, count in counts.items():
            self._counts[name] += count

    def add(self, sums: Mapping[str, Tensor], *, largest: Mapping[str, Tensor]) -> None:
        """Add one micro-batch.

        Args:
            sums: by name, over its loss tokens; `loss` is a weighted sum.
            largest: by name, of its loss tokens, and not below 0.
        """
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in largest.items():
            self._largest[name] = torch.maximum(self._largest.get(name, value), value)

    def over(self, ranks: Ranks, *, num_tokens: int) -> tuple[dict[str, float], dict[str, int]]:
        """The sums of all ranks.

        Args:
            ranks: all of them call this.
            num_tokens: loss tokens of the step, of all ranks.

        Returns:
            metrics as means over the step's tokens, or the largest of all; and the counts of all ranks.
        """
        names = sorted(self._sums)
        added = ranks.sums([*(self._sums[name].item() for name in names), *self._counts.values()])
        sums = dict(zip(names, added, strict=False))
        metrics = {name: value / num_tokens for name, value in sums.items() if name != "loss"} if num_tokens else {}
        metrics["loss"] = sums.get("loss", 0.0)
        metrics |= {name: ranks.largest(self._largest[name].item()) for name in sorted(self._largest)}
        return metrics, dict(zip(COUNTS, map(int, added[len(names) :]), strict=True))


_DIFFERENCE = "sampling/sampling_logp_difference"  # between the old policy's logprobs and the sampler's
PerTokenLoss = Callable[[Any], LossOutput]  # of `LossInputs` for a policy, of `ValueInputs` for a critic
PerSequence = Mapping[int, Tensor]  # sequence index -> [C]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Loss and metric sums of a micro-batch."""

    loss: Tensor  # [] sum of loss weight times per-token loss; carries the gradient
    outputs: Tensor  # [T] what the old model says of each token: a policy its logprob, a critic a value
    sums: Mapping[str, Tensor]  # over its tokens, of what is reported
    largest: Mapping[str, Tensor]  # of its tokens, of what is reported; 0 where it has none


class AnyStepLoss(Protocol):
    """The loss of any of a step's sequences, and the model that it is of."""

    @property
    def policy(self) -> Policy:
        """The model."""
        ...

    def __call__(
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], prefix: PrefixState | None
    ) -> MicroBatchLoss:
        """Forward pass of a micro-batch, which may go on from a prompt that was computed before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """`sum(loss_weight * per_token_loss)` over the tokens of any of a step's sequences."""

    policy: Policy
    policy_loss: PolicyLoss
    temperature: float
    old_logprobs: PerSequence | None  # None: the current policy is the old one
    reference_logprobs: PerSequence | None  # None: the loss has no KL term
    gradients_in_forward: bool

    def __call__(
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], prefix: PrefixState | None
    ) -> MicroBatchLoss:
        """Forward pass of a micro-batch.

        Args:
            micro_batch: on the policy's device.
            sequences: that it is made of.
            prefix: of all sequences of the micro-batch, if it was computed before.
        """
        old = joined(self.old_logprobs, sequences, micro_batch.loss_weights)
        reference = joined(self.reference_logprobs, sequences, micro_batch.loss_weights)
        sums: dict[str, Tensor] = {}

        def token_loss(logprobs: Tensor, entropy: Tensor | None, tokens: slice) -> Tensor:
            """Weighted loss of consecutive tokens."""
            assert entropy is not None
            out = self.policy_loss(
                LossInputs(
                    logprobs=logprobs,
                    old_logprobs=logprobs.detach() if old is None else old[tokens],
                    sampling_logprobs=micro_batch.sampling_logprobs[tokens],
                    reference_logprobs=None if reference is None else reference[tokens],
                    entropy=entropy,
                    advantages=micro_batch.advantages[tokens],
                    trajectory_ids=micro_batch.trajectory_ids[tokens],
                )
            )
            for name, values in {"entropy": entropy.detach(), **out.token_metrics}.items():
                sums[name] = sums.get(name, 0.0) + values.sum()
            return micro_batch.loss_weights[tokens] * out.per_token_loss

        if self.gradients_in_forward and len(micro_batch.labels):
            loss, logprobs = self.policy.loss(micro_batch, token_loss, temperature=self.temperature, prefix=prefix)
        else:
            logprobs, entropy = self.policy.logprobs(micro_batch, temperature=self.temperature, prefix=prefix)
            loss = token_loss(logprobs, entropy, slice(None)).sum()
        old = logprobs.detach() if old is None else old
        differences = (old - micro_batch.sampling_logprobs).abs()
        return MicroBatchLoss(
            loss=loss,
            outputs=old,
            sums={"loss": loss.detach(), **sums, f"{_DIFFERENCE}/mean": differences.sum()},
            largest={f"{_DIFFERENCE}/max": torch.cat([differences, differences.new_zeros(1)]).max()},
        )


def per_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
    """Split values of the loss tokens [T] by the index of their sequence, [C] each."""
    parts = values.split([s.num_loss_tokens for s in sequences]) if sequences else ()
    return {s.index: part for s, part in zip(sequences, parts, strict=True)}


def joined(values: PerSequence | None, sequences: Sequence[TrainSequence], like: Tensor) -> Tensor | None:
    """The values of sequences one after the other, [T]."""
    if values is None:
        return None
    return torch.cat([like.new_zeros(0), *(values[s.index] for s in sequences)])
