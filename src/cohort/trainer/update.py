"""The updates of a step: forward and backward passes, optimizer steps, coefficients, the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from cohort.algorithms import CoefficientState, mean_reference_kl, with_gradient, with_returns
from cohort.batch import TrainBatch
from cohort.config import Config, CriticConfig
from cohort.engine import OptimResult, TrainResult
from cohort.metrics import PhaseClock
from cohort.records import Estimates, TrainSequence
from cohort.trainer.worker import TrainedModel, Worker
from cohort.trainer.worker_calls import pack_batches
from cohort.trainer.worker_group import WorkerGroup

Batches = Mapping[TrainedModel, Sequence[TrainBatch]]  # a step's sequences, packed: one batch per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Results of a step's updates."""

    results: Mapping[TrainedModel, Sequence[TrainResult]]  # by update
    metrics: Mapping[str, float]  # means over the updates


@dataclass(slots=True, kw_only=True)
class Updater:
    """Updates policy and critic on the sequences of a step."""

    config: Config
    workers: WorkerGroup[Worker]
    clock: PhaseClock  # of the phases "train" and "optim"
    control: CoefficientState  # state of the coefficients that adapt
    begin: Callable[[], None]  # called before weights change
    out_of_memory: Callable[[int], None]  # called with the number of micro-batches that ran out of memory

    def pack(self, sequences: Sequence[TrainSequence]) -> Batches:
        """Pack a step's sequences for the policy, without those that have no gradient, and for the critic."""
        worker, algorithm = self.workers.local, self.workers.local.algorithm
        learned = with_gradient(sequences, algorithm)
        of_policy = pack_batches(worker.engine, learned, sequence_level=algorithm.sequence_level)
        if worker.critic is None:
            return {"policy": of_policy}
        return {"policy": of_policy, "critic": pack_batches(worker.critic, with_returns(sequences))}

    def update(
        self,
        batches: Batches,
        sequences: Sequence[TrainSequence],
        estimates: Estimates,
        *,
        num_trajectories: int,
        steps_done: int,
    ) -> Updates:
        """Do all updates of a step, which is number `steps_done` counted from 1."""
        algorithm = self.workers.local.algorithm
        results: dict[TrainedModel, list[TrainResult]] = {model: [] for model in batches}
        metrics = []
        for number in range(self.config.train.updates_per_rollout):
            done, of_update = self._update_once(batches, again=number > 0)
            self.control = algorithm.update_coefficients(self.control, done["policy"][0].metrics, num_trajectories)
            self.out_of_memory(sum(r.num_out_of_memory for of_model in done.values() for r in of_model))
            for model, of_model in done.items():
                results[model] += of_model
            metrics.append(of_update)
        kl_of_rewards = mean_reference_kl(algorithm, estimates, sequences)
        self.control = algorithm.update_coefficients(self.control, kl_of_rewards, num_trajectories)
        with self.clock.phase("optim"):
            self._refresh_reference(steps_done)
        return Updates(results=results, metrics={**_means(metrics), **kl_of_rewards})

    def _update_once(
        self, batches: Batches, *, again: bool
    ) -> tuple[dict[TrainedModel, list[TrainResult]], dict[str, float]]:
        """One update of the policy, after the critic's that go with it; `again`: another one on the same batches.

        A critic's gradient is gone before the policy's is there: memory never has both.
        """
        workers, algorithm = self.workers, self.workers.local.algorithm
        coefficients = algorithm.coefficients(self.control)

        def forward_backward(model: TrainedModel, *, again: bool) -> TrainResult:
            shards = [None if again else batch for batch in batches[model]]
            return workers.scatter(Worker.forward_backward, shards, model, coefficients)[0]

        results: dict[TrainedModel, list[TrainResult]] = {model: [] for model in batches}
        critic_metrics = []
        num_critic_updates = (self.config.critic or CriticConfig()).updates if "critic" in batches else 0
        with self.clock.phase("train"):
            for number in range(num_critic_updates):
                self.begin()
                result = forward_backward("critic", again=again or number > 0)
                optim = workers.call(Worker.optim_step, "critic")[0]
                results["critic"].append(result)
                critic_metrics.append(_value_metrics(result, optim))
            result = forward_backward("policy", again=again)
            results["policy"].append(result)
        self.begin()
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
    """A critic's metrics under names of their own."""
    renamed = {"loss": "value_loss"}
    return {
        **{renamed.get(name, name): value for name, value in result.metrics.items()},
        "value/grad_norm": optim.grad_norm,
        "value/learning_rate": optim.learning_rate,
    }


def _means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over updates, which all have the same metrics; none of no update."""
    names = metrics[0] if metrics else ()
    return {name: sum(of_update[name] for of_update in metrics) / len(metrics) for name in names}
