"""Train a critic: the training engine with values and returns instead of logprobs and advantages.

T loss tokens of a micro-batch, C of one sequence.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from cohort.batch import MicroBatch, ValueInputs
from cohort.engine.loss import MicroBatchLoss, PerSequence, PerTokenLoss, concat_sequences
from cohort.engine.train_engine import TrainEngine
from cohort.models import Critic, PrefixState
from cohort.records import ForwardOnlyOutput, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStepLoss:
    """Value loss `sum(loss_weight * per_token_loss)` of a step's micro-batches."""

    policy: Critic
    value_loss: PerTokenLoss  # takes `ValueInputs`
    old_values: PerSequence | None  # None if the current critic is the old one

    def __call__(
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], prefix: PrefixState | None
    ) -> MicroBatchLoss:
        """Run the forward pass of a micro-batch; see `StepLoss`."""
        values = self.policy.values(micro_batch, prefix=prefix)
        old = concat_sequences(self.old_values, sequences, micro_batch.loss_weights)
        if old is None:
            old = values.detach()
        out = self.value_loss(ValueInputs(values=values, old_values=old, returns=micro_batch.returns.to(values)))
        loss = (micro_batch.loss_weights * out.per_token_loss).sum()
        sums = {name: metric.sum() for name, metric in out.token_metrics.items()}
        return MicroBatchLoss(loss=loss, outputs=old, sums={"loss": loss.detach(), **sums}, largest={})


class CriticEngine(TrainEngine):
    """Train a critic on sequences with returns; its loss takes `ValueInputs`.

    `old_outputs` are the old values.
    """

    policy: Critic

    def forward_only(
        self, sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyOutput]
    ) -> dict[ForwardOnlyOutput, PerSequence]:
        """Compute the values of this rank's sequences; see `TrainEngine.forward_only`."""
        assert wanted == {"values"}, "a critic computes only values"
        return {"values": super().forward_only(sequences, {"logprobs"})["logprobs"]}

    def _step_loss(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> ValueStepLoss:
        old: Mapping[int, Tensor] | None = None if is_old else self.old_outputs
        return ValueStepLoss(policy=self.policy, value_loss=per_token_loss, old_values=old)
