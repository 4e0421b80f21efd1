"""Warnings about a step: out of memory, long sequences, logprob mismatch, cut completions, turns, and rewards."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cohort.config import RolloutConfig
from cohort.health.reward_health import RewardWatch
from cohort.health.warning_signs import CUT_WINDOW, logprobs_are_comparable, mostly_cut, turn_signs
from cohort.packing.batch import TrainBatch
from cohort.trainer.worker import Worker


@dataclass(slots=True, kw_only=True)
class StepWarnings:
    """Warns the user when a step does not go as expected."""

    rollout: RolloutConfig
    worker: Worker  # rank 0's
    notify: Callable[[str], None]
    reward_watch: RewardWatch
    _warned_of_long_sequences: bool = field(default=False, init=False)
    _warned_of_different_logprobs: bool = field(default=False, init=False)
    _warned_of_cut: bool = field(default=False, init=False)
    _last: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=CUT_WINDOW), init=False)
    _warned_of_turns: set[str] = field(default_factory=set, init=False)  # metrics

    def out_of_memory(self, num_out_of_memory: int) -> None:
        """Report micro-batches that ran out of memory and the reduced token budget."""
        if num_out_of_memory:
            budget = self.worker.engine.budget.tokens
            self.notify(
                f"out of memory in {num_out_of_memory} micro-batches; recomputed with "
                f"train.micro_batch_tokens={budget}, which the run keeps from now on"
            )

    def long_sequences(self, batch: TrainBatch) -> None:
        """Warn once about sequences that exceed the token budget."""
        if batch.num_over_budget and not self._warned_of_long_sequences:
            self._warned_of_long_sequences = True
            budget = self.worker.engine.budget.tokens
            self.notify(
                f"warning: {batch.num_over_budget} sequences exceed train.micro_batch_tokens={budget}; each runs alone "
                f"in an oversized micro-batch"
            )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn about what the metrics of the step that just ended show."""
        self._different_logprobs(metrics)
        self._cut_completions(metrics)
        self._turns(metrics)
        for text in self.reward_watch.warnings(step, metrics):
            self.notify(text)

    def _different_logprobs(self, metrics: Mapping[str, float]) -> None:
        """Warn once if the sampler's logprobs differ from the trainer's by more than rounding (law 5)."""
        rollout = {"top_p": self.rollout.top_p, "top_k": self.rollout.top_k}
        if self._warned_of_different_logprobs or not logprobs_are_comparable(rollout, metrics):
            return
        largest = metrics.get("sampling/sampling_logp_difference/max", 0.0)
        tolerance = self.worker.policy.logprob_tolerance
        if largest > tolerance:
            self._warned_of_different_logprobs = True
            self.notify(
                f"warning: logprobs of sampler and trainer differ by up to {largest:.2g} nats (expected at most "
                f"{tolerance:g}); they may compute this model differently"
            )

    def _cut_completions(self, metrics: Mapping[str, float]) -> None:
        """Warn once if most completions are cut for several steps: they seldom reach an answer."""
        self._last.append(metrics)
        share = mostly_cut(list(self._last)) if len(self._last) == CUT_WINDOW and not self._warned_of_cut else None
        if share is not None:
            self._warned_of_cut = True
            rollout = self.rollout
            limit = f"rollout.max_completion_tokens: {rollout.max_completion_tokens}"
            if rollout.has_turns:
                limit += f" or {rollout.max_new_tokens_key}: {rollout.max_new_tokens}"
            self.notify(
                f"warning: {share:.0%} of the completions of the last {CUT_WINDOW} steps were cut at {limit}, and "
                f"what is cut has seldom reached its answer; raise it, or add the reward overlong, which teaches "
                f"shorter ones"
            )

    def _turns(self, metrics: Mapping[str, float]) -> None:
        """Warn once each about malformed or failing tool calls, ends by the limit of turns, and slow environments."""
        for name, text in turn_signs(metrics, self.rollout.max_turns).items():
            if name not in self._warned_of_turns:
                self._warned_of_turns.add(name)
                self.notify(f"warning: {text}")
