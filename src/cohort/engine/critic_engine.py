"""Train a critic: the training engine with values and returns instead of logprobs and advantages."""

from collections.abc import Sequence, Set

from cohort.engine.loss import PerSequence, PerTokenLoss, ValueStepLoss
from cohort.engine.train_engine import TrainEngine
from cohort.models import Critic
from cohort.records import ForwardOnlyField, TrainSequence


class CriticEngine(TrainEngine):
    """Train a critic on sequences with returns; its loss takes `ValueInputs`.

    `old_outputs` are the old values.
    """

    policy: Critic

    def forward_only(
        self, sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyField]
    ) -> dict[ForwardOnlyField, PerSequence]:
        """Compute the values of this rank's sequences; see `TrainEngine.forward_only`."""
        assert wanted == {"values"}, "a critic computes only values"
        return {"values": super().forward_only(sequences, {"logprobs"})["logprobs"]}

    def _step_loss(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> ValueStepLoss:
        old_values = None if is_old else self.old_outputs
        return ValueStepLoss(policy=self.policy, value_loss=per_token_loss, old_values=old_values)
