"""What every rank of a run has and does: sample, compute gradients, update, send and save weights."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.algorithms import Algorithm, Coefficients
from cohort.batch import TrainBatch
from cohort.checkpoint import TrainerState, disk_errors, save_checkpoint, save_model
from cohort.distributed import Ranks
from cohort.engine import CriticEngine, LargestShare, OptimResult, TrainEngine, TrainResult, find_budget, must_fit
from cohort.metrics import PeakMemory
from cohort.policy import Policy, Saving, stream_weights, weight_specs
from cohort.records import Estimate, FloatArray, TrainSequence, scatter
from cohort.rollout import Purpose, Sampled, Sampler, SampleRequest
from cohort.rollout.vllm import Lender, describe_device

SendWeights = Callable[[Iterator[tuple[str, Tensor]], Mapping[str, Any]], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's models, optimizers and sampler. All ranks run the same method at the same time (`WorkerGroup`)."""

    ranks: Ranks
    policy: Policy
    algorithm: Algorithm
    engine: TrainEngine
    critic: CriticEngine | None = None  # None: the algorithm has none
    critic_updates: int = 1  # per update of the policy
    sampler: Sampler
    tokenizer: Any  # rank 0's; None elsewhere
    memory: PeakMemory
    saving: Saving = field(default_factory=Saving)  # how weights are written

    def sample(self, requests: Sequence[SampleRequest], purpose: Purpose) -> list[tuple[Sampled, ...]]:
        """Sample this rank's share of the completions of each request."""
        # sampling for an evaluation is no part of a step
        phase = self.memory.phase("rollout") if purpose == "train" else nullcontext()
        with (
            phase,
            must_fit(
                "while sampling, for which every process needs the whole model and the cache of rollout.max_num_seqs "
                "completions; lower rollout.max_num_seqs or rollout.max_completion_tokens"
            ),
        ):
            return self.sampler.sample(requests)

    def ping(self) -> None:
        """Do nothing: receiving the call renews the deadline for the next one."""

    def free_cache(self) -> None:
        """Give back the GPU memory that PyTorch keeps for later."""
        torch.cuda.empty_cache()

    def estimate(
        self, sequences: Sequence[TrainSequence], wanted: Set[Estimate]
    ) -> dict[Estimate, dict[int, FloatArray]]:
        """Compute the estimates of this rank's sequences: by sequence index, [L] float64, 0 outside the loss mask."""
        estimates = self.engine.estimate(sequences, wanted - {"values"})
        if "values" in wanted:
            assert self.critic is not None, "an algorithm that asks for values was built without a critic"
            estimates |= self.critic.estimate(sequences, {"values"})
        masks = {s.index: s.loss_mask for s in sequences}
        return {
            name: {i: scatter(masks[i], x.double().cpu().numpy()) for i, x in of.items()}
            for name, of in estimates.items()
        }

    def send_weights(self, send: SendWeights | None, dtype: torch.dtype, *, lend: bool = False) -> None:
        """Gather the weights one by one, and hand them to rank 0's `send`.

        Args:
            send: gets names, as in a saved model folder, with whole tensors; and, by GPU, the handles that open what
                the ranks lend. None on the other ranks.
            dtype: of the tensors that `send` gets.
            lend: every rank lends its own copy of the tensors to other processes on its GPU.
        """
        weights = stream_weights(self.policy, dtype)
        handles: Mapping[str, Any] = {}
        if lend:
            with must_fit("for the buffer in which weights are lent to vLLM; lower rollout.gpu_memory_utilization"):
                lender = Lender(weight_specs(self.policy, dtype), self.ranks, self.policy.device)
            weights, handles = lender.stage(weights), lender.handles
        try:
            if send is not None:
                send(weights, handles)
        finally:  # the other ranks take part in all of it, whatever has become of the receivers
            deque(weights, maxlen=0)

    def gpu(self) -> str | None:
        """This rank's GPU, by UUID; None on a CPU."""
        return describe_device(self.policy.device)["gpu"]

    def forward_backward(self, batch: TrainBatch | None, coefficients: Coefficients) -> TrainResult:
        """Compute the gradient of a step.

        Args:
            batch: this rank's; None for another update on the last one.
            coefficients: of the loss's terms.

        Raises:
            StopRequested: the run was asked to end; no weight was changed.
        """
        with self.memory.phase("train"):
            may_stop = batch is not None and self.critic is None  # which has been updated in this step already
            result = self.engine.forward_backward(batch, self.algorithm.loss_at(coefficients), may_stop=may_stop)
            self._keep_one_budget()
            return result

    def train_critic(self, batch: TrainBatch | None) -> TrainResult:
        """Do the critic's updates that go with one of the policy: gradient and optimizer step.

        The gradient is gone before the policy's is there: memory never has both.

        Args:
            batch: this rank's; None for more updates on the last one.

        Returns:
            metrics as means over the updates, and counts of all of them.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
            StopRequested: the run was asked to end; no weight was changed.
        """
        assert self.critic is not None and self.algorithm.critic is not None
        total = TrainResult.nothing()
        with self.memory.phase("train"):
            for update in range(self.critic_updates):
                again = update > 0
                result = self.critic.forward_backward(
                    None if again else batch, self.algorithm.critic.loss, may_stop=batch is not None and not again
                )
                self._keep_one_budget()
                with _update_must_fit():
                    optim = self.critic.optim_step()
                total += replace(result, metrics=_value_metrics(result, optim))
        return replace(total, metrics={name: value / self.critic_updates for name, value in total.metrics.items()})

    def optim_step(self) -> OptimResult:
        """Update the policy.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
        """
        with self.memory.phase("optim"), _update_must_fit():
            return self.engine.optim_step()

    def refresh_reference(self, mix: float) -> None:
        """Move the reference towards the policy, by `mix` of the way."""
        self.engine.refresh_reference(mix)

    def save(self, root: Path, state: TrainerState, *, keep: int) -> None:
        """Write the checkpoint `root/step-N` and delete all but the last `keep` ones.

        Raises:
            TrainingError: the disk is full.
        """
        save_checkpoint(
            root,
            policy=self.policy,
            tokenizer=self.tokenizer,
            critic=None if self.critic is None else self.critic.policy,
            engine_state=self.engine_state(),
            state=state,
            keep=keep,
            ranks=self.ranks,
            saving=self.saving,
        )

    def save_model(self, folder: Path) -> None:
        """Write the model and its tokenizer.

        Raises:
            TrainingError: the disk is full.
        """
        with disk_errors(folder):
            save_model(self.policy, self.tokenizer, folder, self.ranks, self.saving)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, for whoever samples with it.

        Raises:
            TrainingError: the disk is full.
        """
        assert self.policy.adapter is not None, "nothing else is saved by itself"
        weights = self.policy.adapter.whole_weights()
        if self.ranks.is_first:
            with disk_errors(folder):
                self.policy.adapter.save(folder, weights)

    def engine_state(self) -> dict[str, Any]:
        """The state of all optimizers, for a checkpoint."""
        return self.engine.state_dict() | ({} if self.critic is None else {"critic": self.critic.state_dict()})

    def load_engine_state(self, state: Mapping[str, Any]) -> None:
        """Load what `engine_state` returned."""
        self.engine.load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    def find_budget(self, share: LargestShare, most_tokens: int) -> int:
        """Find the largest `train.micro_batch_tokens` that fits on every rank (`auto`).

        The critic and its optimizer are there while the policy is trained, and the other way round.

        Args:
            share: a rank's largest share of a step; the trials are made of its groups.
            most_tokens: no more than this is ever computed at a time.
        """
        critic, functions = self.critic, self.algorithm.critic
        room = 0 if critic is None else critic.num_device_state_bytes
        found = find_budget(
            self.engine,
            self.algorithm.policy_loss,
            share=share,
            most_tokens=most_tokens,
            reserved_bytes=room,
        )
        if critic is not None and functions is not None:
            room = self.engine.num_device_state_bytes
            found = find_budget(critic, functions.loss, share=share, most_tokens=found, reserved_bytes=room)
        self._keep_one_budget()
        return found

    def peak_memory(self) -> dict[str, int]:
        """Peak bytes by phase since the last call, and since the start."""
        return self.memory.take()

    def _keep_one_budget(self) -> None:
        """What has run out of memory for one model is the budget of both: it is one number in a checkpoint."""
        if self.critic is not None:
            smaller = min(self.engine.micro_batch_tokens, self.critic.micro_batch_tokens)
            self.engine.micro_batch_tokens = self.critic.micro_batch_tokens = smaller


def _update_must_fit() -> AbstractContextManager[None]:
    return must_fit(
        "in the update: weights, gradients and the optimizer's state do not fit together; use more processes, or "
        "model.dtype: bfloat16"
    )


def _value_metrics(result: TrainResult, optim: OptimResult) -> dict[str, float]:
    """A critic's metrics under names of their own."""
    renamed = {"loss": "value_loss"}
    return {
        **{renamed.get(name, name): value for name, value in result.metrics.items()},
        "value/grad_norm": optim.grad_norm,
        "value/learning_rate": optim.learning_rate,
    }
