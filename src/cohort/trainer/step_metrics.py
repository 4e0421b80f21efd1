"""Metrics of a step (token counts, timings, memory, speed), and warnings about it."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cohort.config import RolloutConfig
from cohort.health.reward_health import RewardWatch
from cohort.health.warning_signs import CUT_WINDOW, logprobs_are_comparable, mostly_cut, turn_signs
from cohort.learner import TrainResult
from cohort.metrics.resources import PhaseClock, device_peak_flops, flops_of, largest_peaks, speed_metrics
from cohort.packing.batch import TrainBatch
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import TrainSequence
from cohort.trainer.collect_groups import StepGroups
from cohort.trainer.update import Updates
from cohort.trainer.worker import Worker


class PerformanceMetrics:
    """Measures tokens, time, memory and FLOPs of steps. Tokens count once, even if a critic processes them too."""

    def __init__(self, workers: WorkerGroup[Worker], clock: PhaseClock, *, num_tokens: int):
        policy = workers.local.policy
        self.num_tokens = num_tokens  # trained on since the start of the run
        self._workers = workers
        self._clock = clock
        self._flops = {model: flops_of(engine.policy.model) for model, engine in workers.local.engines.items()}
        self._device_peak = device_peak_flops(policy.device, policy.compute_dtype or policy.dtype)

    def metrics(
        self, batch: TrainBatch, updates: Updates, sequences: Sequence[TrainSequence], collected: StepGroups
    ) -> dict[str, float]:
        """Metrics of the step that just ended. Reading resets timers and memory peaks; `batch` is rank 0's."""
        workers, times, policy = self._workers, self._clock.take(), updates.results["policy"]
        sampled = collected.num_completion_tokens
        self.num_tokens += sum(len(s.token_ids) for s in sequences)
        num_positions = sum(p.num_positions for p in policy)
        num_computed = sum(p.num_computed_tokens for p in policy)
        return times | {
            "num_tokens": self.num_tokens,
            "tokens_per_second": sampled / times["step_time"],
            "rollout/tokens_per_second": sampled / times["time/rollout_s"],
            "completions/trained_ratio": batch.num_trajectories / collected.num_trajectories,
            "padding_fraction": 1 - num_computed / num_positions if num_positions else 0.0,
            "micro_batches": policy[-1].num_micro_batches,
            "micro_batch_tokens": workers.local.engine.budget.tokens,
            "out_of_memory": sum(r.num_out_of_memory for results in updates.results.values() for r in results),
            "sequences_over_budget": batch.num_over_budget,
            "processes": workers.ranks.world_size,
            "time/communication_s": workers.communication_seconds(),
            **largest_peaks(workers.call(Worker.peak_memory)),
            **speed_metrics(
                self._train_flops(batch, updates),
                seconds=times["time/train_s"],
                num_processes=workers.ranks.world_size,
                peak=self._device_peak,
            ),
            "prompt_tokens_saved": _prompt_tokens_saved(policy),
        }

    def _train_flops(self, batch: TrainBatch, updates: Updates) -> float:
        """FLOPs of a step: forward and backward of trained models, reference forward."""
        total = 0.0
        for model, results in updates.results.items():
            flops, engine = self._flops[model], self._workers.local.engines[model]
            loss_tokens = batch.num_loss_tokens if model == "policy" else 0  # a critic's head is negligible
            for update, result in enumerate(results):
                sizes = {
                    "tokens": result.num_computed_tokens,
                    "loss_tokens": loss_tokens,
                    "pairs": result.attention_pairs,
                }
                total += flops.forward_backward(**sizes)
                if engine.reference_in_loss and update == 0:
                    total += flops.forward(**sizes)
        return total


def _prompt_tokens_saved(results: Sequence[TrainResult]) -> float:
    """Fraction of prompt tokens skipped because prompts are shared."""
    saved = sum(r.num_tokens_unshared - r.num_computed_tokens for r in results)
    total = saved + sum(r.num_prompt_inputs for r in results)
    return saved / total if total else 0.0


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
