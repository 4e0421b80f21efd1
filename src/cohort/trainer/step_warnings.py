"""Notes and warnings about steps: memory that ran out, sequences over the budget, logprobs that differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cohort.batch import TrainBatch
from cohort.config import RolloutConfig
from cohort.trainer.worker import Worker


@dataclass(slots=True, kw_only=True)
class StepWarnings:
    """Tells the user about steps that went otherwise than expected."""

    rollout: RolloutConfig
    worker: Worker  # rank 0's
    note: Callable[[str], None]
    _warned_of_long_sequences: bool = field(default=False, init=False)
    _warned_of_different_logprobs: bool = field(default=False, init=False)

    def out_of_memory(self, num_out_of_memory: int) -> None:
        """Say that micro-batches ran out of memory, and which budget holds from here on."""
        if num_out_of_memory:
            budget = self.worker.engine.budget.tokens
            self.note(
                f"out of memory in {num_out_of_memory} micro-batches: that pass was computed again with smaller ones; "
                f"the gradient is the same, and the budget is {budget} tokens from here on"
            )

    def long_sequences(self, batch: TrainBatch) -> None:
        """Warn once of sequences that are longer than the token budget."""
        if batch.num_over_budget and not self._warned_of_long_sequences:
            self._warned_of_long_sequences = True
            budget = self.worker.engine.budget.tokens
            self.note(
                f"warning: {batch.num_over_budget} sequences are longer than train.micro_batch_tokens: {budget}; each "
                f"has a micro-batch to itself, over that cap"
            )

    def different_logprobs(self, metrics: Mapping[str, float]) -> None:
        """Law 5: warn once if the sampler and the trainer do not compute the same distribution."""
        if self._warned_of_different_logprobs or self.rollout.top_p < 1 or self.rollout.top_k > 0:
            return  # with top-p or top-k the sampler's distribution is another one, and the difference says nothing
        if metrics["rollout/staleness_max"] > 0:
            return  # older weights have another distribution
        largest = metrics.get("sampling/sampling_logp_difference/max", 0.0)
        tolerance = self.worker.policy.logprob_tolerance
        if largest > tolerance:
            self._warned_of_different_logprobs = True
            self.note(
                f"warning: the sampler's logprobs differ from the trainer's by up to {largest:.2g} (expected: at most "
                f"{tolerance:g}); this model may not be computed the same way in both"
            )
