"""Token counts, timings, memory and speed of a step, as metrics."""

from collections.abc import Sequence

from cohort.batch import TrainBatch
from cohort.engine import TrainResult
from cohort.metrics import PhaseClock, device_peak_flops, flops_of, largest_peaks, speed_metrics
from cohort.records import TrainSequence
from cohort.trainer.collect_groups import Gathered
from cohort.trainer.update import Updates
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


class StepCosts:
    """Measure what steps cost. Tokens are the policy's; a critic computes the same."""

    def __init__(self, workers: WorkerGroup[Worker], clock: PhaseClock, *, num_tokens: int):
        policy = workers.local.policy
        self.num_tokens = num_tokens  # that the run has trained on so far
        self._workers = workers
        self._clock = clock
        self._flops = {model: flops_of(engine.policy.model) for model, engine in workers.local.engines.items()}
        self._device_peak = device_peak_flops(policy.device, policy.compute_dtype or policy.dtype)

    def take(
        self, batch: TrainBatch, updates: Updates, sequences: Sequence[TrainSequence], gathered: Gathered
    ) -> dict[str, float]:
        """Metrics of the step that has just ended; `batch` is rank 0's."""
        workers, times, policy = self._workers, self._clock.take(), updates.results["policy"]
        sampled = gathered.num_completion_tokens
        self.num_tokens += sum(len(s.token_ids) for s in sequences)
        num_positions = sum(p.num_positions for p in policy)
        return times | {
            "num_tokens": self.num_tokens,
            "tokens_per_second": sampled / times["step_time"],
            "rollout/tokens_per_second": sampled / times["time/rollout_s"],
            "completions/trained_ratio": batch.num_trajectories / gathered.num_trajectories,
            "padding_fraction": 1 - sum(p.num_inputs for p in policy) / num_positions if num_positions else 0.0,
            "micro_batches": policy[-1].num_micro_batches,
            "micro_batch_tokens": workers.local.engine.budget.tokens,
            "out_of_memory": sum(r.num_out_of_memory for results in updates.results.values() for r in results),
            "sequences_over_budget": batch.num_over_budget,
            "processes": workers.ranks.world_size,
            "time/move_s": workers.seconds_moving(),
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
        """FLOPs of a step: forward and backward of what is trained, reference forward."""
        total = 0.0
        for model, results in updates.results.items():
            flops, engine = self._flops[model], self._workers.local.engines[model]
            loss_tokens = batch.num_loss_tokens if model == "policy" else 0  # a critic's head is negligible
            for update, done in enumerate(results):
                sizes = {"tokens": done.num_inputs, "loss_tokens": loss_tokens, "pairs": done.attention_pairs}
                total += flops.forward_backward(**sizes)
                if engine.reference_in_loss and update == 0:
                    total += flops.forward(**sizes)
        return total


def _prompt_tokens_saved(results: Sequence[TrainResult]) -> float:
    """The share of the prompt tokens that need not be computed because groups share their prompts."""
    saved = sum(done.num_unshared_inputs - done.num_inputs for done in results)
    whole = saved + sum(done.num_prompt_inputs for done in results)
    return saved / whole if whole else 0.0
