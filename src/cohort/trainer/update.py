"""Update the policy and the critic on a step's sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from cohort.algorithms import Coefficients, CoefficientState, critic_sequences, drop_zero_gradient, mean_reference_kl
from cohort.config import Config, CriticConfig
from cohort.learner import OptimResult, TrainResult
from cohort.metrics.resources import PhaseClock
from cohort.packing.batch import TrainBatch
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ForwardOnlyOutputs, TrainSequence
from cohort.trainer.worker import TrainedModel, Worker, pack_batches

Batches = Mapping[TrainedModel, Sequence[TrainBatch]]  # one packed batch per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Results of all updates of a step."""

    results: Mapping[TrainedModel, Sequence[TrainResult]]  # one per update
    metrics: Mapping[str, float]  # means over the updates
    each: Sequence[Mapping[str, float]]  # metrics of each update


@dataclass(slots=True, kw_only=True)
class Updater:
    """Runs the updates of each step on all workers."""

    config: Config
    workers: WorkerGroup[Worker]
    clock: PhaseClock  # records the phases "train" and "optim"
    coefficient_state: CoefficientState  # state of adaptive KL and entropy coefficients
    before_update: Callable[[], None]  # called before weights change
    on_out_of_memory: Callable[[int], None]  # called with the number of micro-batches that ran out of memory

    @property
    def coefficients(self) -> Coefficients:
        """Current coefficients of the regularizers."""
        return self.workers.local.algorithm.coefficients(self.coefficient_state)

    def pack(self, sequences: Sequence[TrainSequence]) -> Batches:
        """Pack a step's sequences for the policy (only those with a gradient) and the critic."""
        worker, algorithm = self.workers.local, self.workers.local.algorithm
        learned = drop_zero_gradient(sequences, algorithm)
        policy_batches = pack_batches(worker.engine, learned, sequence_level=algorithm.sequence_level)
        if worker.critic is None:
            return {"policy": policy_batches}
        return {"policy": policy_batches, "critic": pack_batches(worker.critic, critic_sequences(sequences))}

    def update(
        self,
        batches: Batches,
        outputs: ForwardOnlyOutputs,
        *,
        num_trajectories: int,
        steps_done: int,
    ) -> Updates:
        """Run all updates of a step; `steps_done` includes this step."""
        algorithm = self.workers.local.algorithm
        results: dict[TrainedModel, list[TrainResult]] = {model: [] for model in batches}
        metrics = []
        for number in range(self.config.train.updates_per_rollout):
            update_results, update_metrics = self._update_once(batches, again=number > 0)
            self.coefficient_state = algorithm.update_coefficients(
                self.coefficient_state, update_results["policy"][0].metrics, num_trajectories
            )
            for model, model_results in update_results.items():
                results[model] += model_results
            self.on_out_of_memory(sum(r.num_out_of_memory for rs in update_results.values() for r in rs))
            metrics.append(update_metrics)
        reward_kl = mean_reference_kl(algorithm, outputs)
        self.coefficient_state = algorithm.update_coefficients(self.coefficient_state, reward_kl, num_trajectories)
        with self.clock.phase("optim"):
            self._refresh_reference(steps_done)
        return Updates(results=results, metrics={**_means(metrics), **reward_kl}, each=metrics)

    def _update_once(
        self, batches: Batches, *, again: bool
    ) -> tuple[dict[TrainedModel, list[TrainResult]], dict[str, float]]:
        """Update the critic, then the policy. With `again`, the workers use the batches that they already have.

        The critic's gradient is freed before the policy's is computed, so that memory never holds both.
        """
        workers, algorithm = self.workers, self.workers.local.algorithm
        coefficients = self.coefficients

        def forward_backward(model: TrainedModel, *, again: bool) -> TrainResult:
            shards = [None if again else batch for batch in batches[model]]
            return workers.scatter(Worker.forward_backward, shards, model, coefficients)[0]

        results: dict[TrainedModel, list[TrainResult]] = {model: [] for model in batches}
        critic_metrics = []
        num_critic_updates = (self.config.critic or CriticConfig()).updates if "critic" in batches else 0
        with self.clock.phase("train"):
            for number in range(num_critic_updates):
                self.before_update()
                result = forward_backward("critic", again=again or number > 0)
                optim = workers.call(Worker.optim_step, "critic")[0]
                results["critic"].append(result)
                critic_metrics.append(_value_metrics(result, optim))
            result = forward_backward("policy", again=again)
            results["policy"].append(result)
        self.before_update()
        with self.clock.phase("optim"):
            optim = workers.call(Worker.optim_step, "policy")[0]
        metrics = {
            **result.metrics,
            **_means(critic_metrics),
            **asdict(optim),
            **algorithm.coefficient_metrics(coefficients),
        }
        return results, metrics

    def _refresh_reference(self, steps_done: int) -> None:
        """Move the reference towards the policy every `reference.refresh_every` steps."""
        reference = self.config.reference
        if reference is not None and reference.mix is not None and steps_done % reference.refresh_every == 0:
            self.workers.call(Worker.refresh_reference, reference.mix)


def _value_metrics(result: TrainResult, optim: OptimResult) -> dict[str, float]:
    """Metrics of a critic update, under names that differ from the policy's."""
    renamed = {"loss": "value_loss"}
    return {
        **{renamed.get(name, name): value for name, value in result.metrics.items()},
        "value/grad_norm": optim.grad_norm,
        "value/learning_rate": optim.learning_rate,
    }


def _means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; empty without updates."""
    names = metrics[0] if metrics else ()
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in names}
