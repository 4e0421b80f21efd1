"""Metrics of a step (token counts, timings, memory, speed), and warnings about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cohort.config import Config
from cohort.health.facts import facts_of
from cohort.health.findings import HEALTH, Finding, findings_in
from cohort.health.monitor import HealthMonitor
from cohort.learner import TrainResult
from cohort.metrics.resources import PhaseClock, device_peak_flops, flops_of, largest_peaks, speed_metrics
from cohort.packing.batch import TrainBatch
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import TrainSequence
from cohort.rewards import RewardRunner
from cohort.run.folder import RunFolder
from cohort.run.log import read_events
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
    """Tells the user about memory in a step, with the token budget that follows."""

    worker: Worker  # rank 0's
    notify: Callable[[str], None]
    _warned_of_long_sequences: bool = field(default=False, init=False)

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


def health_monitor(
    config: Config,
    rewards: RewardRunner,
    *,
    folder: RunFolder,
    num_steps: int,
    steps_done: int,
    logprob_tolerance: float,
    notify: Callable[[str], None],
    on_change: Callable[[Sequence[Finding]], None],
    alert: Callable[[int, Finding], None],
) -> HealthMonitor:
    """Create the monitor of a run, which goes on from what the folder holds if it resumes.

    Args:
        config: the run's configuration.
        rewards: its rewards, which know more of themselves.
        folder: its folder.
        num_steps: steps of the whole run.
        steps_done: steps after which it starts or resumes.
        logprob_tolerance: largest difference of logprobs that rounding explains, in nats.
        notify: shows a finding on the console.
        on_change: called with all findings when they have changed.
        alert: shows a finding in trackers.
    """
    rollout = config.rollout
    limit = f"rollout.max_completion_tokens: {rollout.max_completion_tokens}"
    if rollout.has_turns:
        limit += f" or {rollout.max_new_tokens_key}: {rollout.max_new_tokens}"
    facts = replace(
        facts_of(config.model_dump(mode="json")),
        num_steps=num_steps,
        weights=rewards.weights,
        shaping=[f.name for f in rewards.functions if f.shapes],
        token_limit=limit,
        logprob_tolerance=logprob_tolerance,
    )

    def show(step: int, finding: Finding) -> None:
        notify(f"{'warning: ' if finding.is_warning else ''}step {step}: {finding.sentence}")
        alert(step, finding)

    events = read_events(folder.path, HEALTH) if steps_done else []
    rows = folder.metrics() if steps_done else []
    return HealthMonitor(facts, on_change=on_change, on_notable=show, rows=rows, past=map(findings_in, events))
