"""The loss of a micro-batch: its logprobs, the policy loss over them, and what a step reports of both.

T scored tokens of a micro-batch, C of a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.batch import LossInputs, LossOutput, MicroBatch
from cohort.policy import Branch, Policy
from cohort.records import TrainSequence

# With gradients in forward it is given some consecutive tokens at a time: a token's loss depends on no other's logprob.
PolicyLoss = Callable[[LossInputs], LossOutput]
PerSequence = Mapping[int, Tensor]  # sequence index -> [C]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """What a micro-batch comes to."""

    loss: Tensor  # [] sum of loss weight times per-token loss; carries the gradient
    old_logprobs: Tensor  # [T]
    sums: Mapping[str, Tensor]  # over its tokens, of what is reported


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
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], branch: Branch | None
    ) -> MicroBatchLoss:
        """Forward pass of a micro-batch.

        Args:
            micro_batch: on the policy's device.
            sequences: that it is made of.
            branch: the prompt that it goes on from, where that was computed before.
        """
        old = _joined(self.old_logprobs, sequences, micro_batch.loss_weights)
        reference = _joined(self.reference_logprobs, sequences, micro_batch.loss_weights)
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
                    sequence_ids=micro_batch.sequence_ids[tokens],
                )
            )
            for name, values in {"entropy": entropy.detach(), **out.token_metrics}.items():
                sums[name] = sums.get(name, 0.0) + values.sum()
            return micro_batch.loss_weights[tokens] * out.per_token_loss

        if self.gradients_in_forward and sequences:
            loss, logprobs = self.policy.loss(micro_batch, token_loss, temperature=self.temperature, branch=branch)
        else:
            logprobs, entropy = self.policy.logprobs(micro_batch, temperature=self.temperature, branch=branch)
            loss = token_loss(logprobs, entropy, slice(None)).sum()
        return MicroBatchLoss(
            loss=loss, old_logprobs=logprobs.detach() if old is None else old, sums={"loss": loss.detach(), **sums}
        )


def per_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
    """Values of scored tokens [T] by the index of their sequence, [C] each."""
    parts = values.split([s.num_completion_tokens for s in sequences]) if sequences else ()
    return {s.index: part for s, part in zip(sequences, parts, strict=True)}


def _joined(values: PerSequence | None, sequences: Sequence[TrainSequence], like: Tensor) -> Tensor | None:
    """The values of sequences one after the other, [T]."""
    if values is None:
        return None
    return torch.cat([like.new_zeros(0), *(values[s.index] for s in sequences)])
