"""The updates of a step: forward and backward passes, optimizer steps, coefficients, the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from cohort.algorithms import Control, mean_reference_kl, with_gradient, with_returns
from cohort.batch import TrainBatch
from cohort.config import Config
from cohort.engine import TrainResult
from cohort.metrics import PhaseClock
from cohort.records import Estimates, TrainSequence
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import pack_batches, pack_for_policy
from cohort.trainer.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A step's sequences, packed: one batch per rank."""

    of_policy: Sequence[TrainBatch]
    of_critic: Sequence[TrainBatch]  # none without a critic


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Results of a step's updates."""

    of_policy: Sequence[TrainResult]  # by update
    of_critic: Sequence[TrainResult]
    metrics: Mapping[str, float]  # means over the updates


@dataclass(slots=True, kw_only=True)
class Updater:
    """Updates policy and critic on the sequences of a step."""

    config: Config
    workers: WorkerGroup[Worker]
    clock: PhaseClock  # of the phases "train" and "optim"
    control: Control  # state of the coefficients that adapt
    begin: Callable[[], None]  # called before weights change
    out_of_memory: Callable[[int], None]  # called with the number of micro-batches that ran out of memory

    def pack(self, sequences: Sequence[TrainSequence]) -> Batches:
        """Pack a step's sequences for the policy, without those that have no gradient, and for the critic."""
        worker = self.workers.local
        return Batches(
            of_policy=pack_for_policy(worker, with_gradient(sequences, worker.algorithm)),
            of_critic=() if worker.critic is None else pack_batches(worker.critic, with_returns(sequences)),
        )

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
        of_policy, of_critic, metrics = [], [], []
        for number in range(self.config.train.updates_per_rollout):
            policy, critic, of_update = self._update_once(batches, again=number > 0)
            self.control = algorithm.updated(self.control, policy.metrics, num_trajectories)
            self.out_of_memory(policy.num_out_of_memory + critic.num_out_of_memory)
            of_policy.append(policy)
            of_critic.append(critic)
            metrics.append(of_update)
        kl_of_rewards = mean_reference_kl(algorithm, estimates, sequences)
        self.control = algorithm.updated(self.control, kl_of_rewards, num_trajectories)
        with self.clock.phase("optim"):
            self._refresh_reference(steps_done)
        means = {name: sum(update[name] for update in metrics) / len(metrics) for name in metrics[0]}
        return Updates(of_policy=of_policy, of_critic=of_critic, metrics={**means, **kl_of_rewards})

    def _update_once(self, batches: Batches, *, again: bool) -> tuple[TrainResult, TrainResult, dict[str, float]]:
        """One update of the policy, with the critic's that go with it; `again`: another one on the same batches."""
        workers, algorithm = self.workers, self.workers.local.algorithm
        coefficients = algorithm.coefficients(self.control)
        of_critic = TrainResult.nothing()
        with self.clock.phase("train"):
            if workers.local.critic is not None:
                self.begin()
                shards = [None if again else batch for batch in batches.of_critic]
                of_critic = workers.scatter(Worker.train_critic, shards)[0]
            shards = [None if again else batch for batch in batches.of_policy]
            of_policy = workers.scatter(Worker.forward_backward, shards, coefficients)[0]
        self.begin()
        with self.clock.phase("optim"):
            optim = workers.call(Worker.optim_step)[0]
        metrics = {**of_policy.metrics, **of_critic.metrics, **asdict(optim), **algorithm.as_metrics(coefficients)}
        return of_policy, of_critic, metrics

    def _refresh_reference(self, steps_done: int) -> None:
        """Move the reference towards the policy every `reference.refresh_every` steps."""
        reference = self.config.reference
        if reference is not None and reference.mix is not None and steps_done % reference.refresh_every == 0:
            self.workers.call(Worker.refresh_reference, reference.mix)
