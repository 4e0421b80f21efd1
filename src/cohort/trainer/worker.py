"""The worker on each rank: sample, compute gradients, update, publish and save."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cohort.algorithms import Algorithm, Coefficients
from cohort.batch import TrainBatch
from cohort.checkpoint import TrainerState, disk_errors, save_checkpoint, save_model
from cohort.distributed import Ranks
from cohort.engine import (
    CriticEngine,
    LargestShare,
    OptimResult,
    PerTokenLoss,
    TrainEngine,
    TrainResult,
    find_budget,
    must_fit,
)
from cohort.metrics import PeakMemory
from cohort.models import Policy, SaveOptions, stream_weights, weight_specs
from cohort.records import Estimate, FloatArray, TrainSequence, scatter
from cohort.rollout import Purpose, Sampled, Sampler, SampleRequest
from cohort.rollout.engines.servers.cuda_ipc import IpcBuffer, gpu_uuid

TrainedModel = Literal["policy", "critic"]
SendWeights = Callable[[Iterator[tuple[str, Tensor]], Mapping[str, Any]], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's models, optimizers and sampler. All ranks run the same method at the same time (`WorkerGroup`)."""

    ranks: Ranks
    policy: Policy
    algorithm: Algorithm
    engine: TrainEngine
    critic: CriticEngine | None = None  # None: the algorithm has none
    sampler: Sampler
    tokenizer: Any  # rank 0's; None elsewhere
    memory: PeakMemory
    save_options: SaveOptions = field(default_factory=SaveOptions)  # how weights are written

    @property
    def engines(self) -> dict[TrainedModel, TrainEngine]:
        """Those of all models that are trained."""
        return {"policy": self.engine} if self.critic is None else {"policy": self.engine, "critic": self.critic}

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

    def send_weights(self, send: SendWeights | None, dtype: torch.dtype, *, share: bool = False) -> None:
        """Gather the weights one by one, and hand them to rank 0's `send`.

        Args:
            send: gets names, as in a saved model folder, with whole tensors; and, by GPU, CUDA IPC
                handles of the ranks' buffers. None on the other ranks.
            dtype: of the tensors that `send` gets.
            share: share every rank's copy of the tensors with other processes on its GPU (CUDA IPC).
        """
        weights = stream_weights(self.policy, dtype)
        handles: Mapping[str, Any] = {}
        if share:
            with must_fit("for the buffer that shares weights with servers; lower rollout.gpu_memory_utilization"):
                buffer = IpcBuffer(weight_specs(self.policy, dtype), self.ranks, self.policy.device)
            weights, handles = buffer.stage(weights), buffer.handles
        try:
            if send is not None:
                send(weights, handles)
        finally:  # the other ranks take part in all of it, whatever has become of the receivers
            deque(weights, maxlen=0)

    def gpu(self) -> str | None:
        """This rank's GPU, by UUID; None on a CPU."""
        return gpu_uuid(self.policy.device) if self.policy.device.type == "cuda" else None

    def forward_backward(
        self, batch: TrainBatch | None, model: TrainedModel, coefficients: Coefficients
    ) -> TrainResult:
        """Compute a model's gradient of a step.

        Args:
            batch: this rank's; None for another update on the model's last one.
            model: whose gradient.
            coefficients: of the terms of the policy's loss.

        Raises:
            StopRequested: the run was asked to end; no weight was changed.
        """
        may_stop = batch is not None and (model == "critic" or self.critic is None)  # the critic is updated first
        with self.memory.phase("train"):
            return self.engines[model].forward_backward(batch, self._loss(model, coefficients), may_stop=may_stop)

    def optim_step(self, model: TrainedModel) -> OptimResult:
        """Update a model, whose gradient is gone then.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
        """
        # a critic's updates count as training, in memory as in time
        with (
            self.memory.phase("optim" if model == "policy" else "train"),
            must_fit(
                "in the update: weights, gradients and the optimizer's state do not fit together; use more processes, "
                "or model.dtype: bfloat16"
            ),
        ):
            return self.engines[model].optim_step()

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
            save_options=self.save_options,
        )

    def save_model(self, folder: Path) -> None:
        """Write the model and its tokenizer.

        Raises:
            TrainingError: the disk is full.
        """
        with disk_errors(folder):
            save_model(self.policy, self.tokenizer, folder, self.ranks, self.save_options)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, for whoever samples with it.

        Raises:
            TrainingError: the disk is full.
        """
        assert self.policy.adapter is not None, "nothing else is saved by itself"
        weights = self.policy.adapter.full_weights()
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
        first = self.algorithm.coefficients(self.algorithm.initial_coefficients)
        state_bytes = {model: engine.num_device_state_bytes for model, engine in self.engines.items()}
        for model, engine in self.engines.items():
            most_tokens = find_budget(
                engine,
                self._loss(model, first),
                share=share,
                most_tokens=most_tokens,
                reserved_bytes=sum(state_bytes.values()) - state_bytes[model],
            )
        return most_tokens

    def peak_memory(self) -> dict[str, int]:
        """Peak bytes by phase since the last call, and since the start."""
        return self.memory.take()

    def _loss(self, model: TrainedModel, coefficients: Coefficients) -> PerTokenLoss:
        if model == "policy":
            return self.algorithm.loss_with(coefficients)
        assert self.algorithm.critic is not None, "an algorithm without a critic trains none"
        return self.algorithm.critic.loss
