"""The worker on each rank (sample, compute gradients, update, publish, save), and calls on all of them."""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms import Algorithm, Coefficients
from cohort.errors import TrainingError, UserError
from cohort.learner import (
    CriticEngine,
    OptimResult,
    PerTokenLoss,
    TrainEngine,
    TrainResult,
    WorstCaseShard,
    find_budget,
    must_fit,
)
from cohort.metrics.resources import PeakMemory
from cohort.models import Policy, SaveOptions, save_policy, stream_weights, weight_specs
from cohort.models.adapters.adapter_folder import WEIGHTS_FILE
from cohort.models.fsdp import local_rows
from cohort.models.loading.meta_device import named_saved_tensors
from cohort.models.loading.safetensors_files import map_to_model, stored_weights
from cohort.packing import pack
from cohort.packing.batch import TrainBatch
from cohort.processes.child import Child
from cohort.processes.this_process import usable_cores
from cohort.ranks.collectives import Ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import FloatArray, ForwardOnlyField, ForwardOnlyOutputs, TrainSequence
from cohort.rewards import TrainerProgress
from cohort.rewards.per_group import GroupCalls, GroupScorer, GroupValues
from cohort.rollout import Purpose, SampledCompletion, Sampler, SampleRequest, split_requests
from cohort.rollout.engines.base import PackedCompletions
from cohort.rollout.engines.servers.cuda_ipc import IpcBuffer, IpcHandle
from cohort.rollout.engines.servers.server_side.cohort_weight_group import gpu_uuid
from cohort.rollout.engines.setup import SendWeights
from cohort.rollout.workers.nodes import Node, host_workers
from cohort.run.atomic import disk_errors
from cohort.trainer.checkpoint import TrainerState, save_checkpoint

TrainedModel = Literal["policy", "critic"]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """Models, optimizers and sampler of one rank. All ranks run the same method at the same time (`WorkerGroup`)."""

    ranks: Ranks
    policy: Policy
    algorithm: Algorithm
    engine: TrainEngine
    critic: CriticEngine | None = None  # None if the algorithm has none
    sampler: Sampler
    tokenizer: Any  # None on ranks other than 0
    memory: PeakMemory
    scorer: GroupScorer = field(default_factory=lambda: GroupScorer(dict))  # scores this rank's groups
    save_options: SaveOptions = field(default_factory=SaveOptions)  # how weights are written
    rollout_host: Child | None = None  # runs this node's rollout workers, which end with it

    @property
    def engines(self) -> dict[TrainedModel, TrainEngine]:
        """Engines of all trained models."""
        return {"policy": self.engine} if self.critic is None else {"policy": self.engine, "critic": self.critic}

    def sample(self, requests: Sequence[SampleRequest], purpose: Purpose) -> PackedCompletions:
        """Sample this rank's share of the completions."""
        # evaluations are not part of a step
        phase = self.memory.phase("rollout") if purpose == "train" else nullcontext()
        with (
            phase,
            must_fit(
                "while sampling: every process needs the whole model and the KV cache of rollout.max_num_seqs "
                "completions; lower rollout.max_num_seqs or rollout.max_completion_tokens (with turns: "
                "max_trajectory_tokens)"
            ),
        ):
            return PackedCompletions.of(self.sampler.sample(requests))

    def score_groups(self, calls: Sequence[GroupCalls], progress: TrainerProgress) -> list[GroupValues]:
        """Call rewards that score each group by itself, for this rank's share of the groups.

        Raises:
            StopRequested: the run was asked to stop.
        """
        try:
            return self.scorer.score(calls, progress, stop=self.ranks.stop)
        finally:
            self.ranks.wait_for_all()  # rewards may take longer than other calls

    def ping(self) -> None:
        """Do nothing. Receiving a call renews this rank's deadline for the next one."""

    def free_cores(self) -> int | None:
        """Return the number of cores of this node that no rank uses; None except on the first rank of a node."""
        return None if self.ranks.local_rank else usable_cores() - (self.ranks.ranks_per_node or 1)

    def host_rollout_workers(self, ranks: Set[int], key: bytes) -> Node | None:
        """Let rank 0 start rollout workers on the nodes of some ranks, and return how.

        Raises:
            TrainingError: it cannot.
        """
        if self.ranks.rank not in ranks:
            return None
        self.rollout_host, node = host_workers(key, timeout_s=self.ranks.timeout_s / 2)
        return node

    def empty_cache(self) -> None:
        """Release the GPU memory that PyTorch caches."""
        torch.cuda.empty_cache()

    def forward_only(
        self, batch: TrainBatch, wanted: Set[ForwardOnlyField]
    ) -> dict[ForwardOnlyField, dict[int, FloatArray]]:
        """Compute the `wanted` outputs of a batch without gradient: name -> sequence index -> [C] float64."""
        outputs = self.engine.forward_only(batch.sequences, wanted - {"values"})
        if "values" in wanted:
            assert self.critic is not None, "values need a critic"
            outputs |= self.critic.forward_only(batch.sequences, {"values"})
        return {
            name: dict(zip(by_sequence, _to_host([*by_sequence.values()]), strict=True))
            for name, by_sequence in outputs.items()
        }

    def first_pass_outputs(self, indices: Set[int]) -> dict[ForwardOnlyField, dict[int, FloatArray]]:
        """Return what the policy's first pass over the step computed: name -> sequence index -> [C] trained tokens.

        Args:
            indices: of the sequences that are asked for; this rank has some of them.
        """
        outputs = {}
        for name, by_sequence in self.engine.first_pass_outputs().items():
            own = {index: values for index, values in by_sequence.items() if index in indices}
            outputs[name] = dict(zip(own, _to_host([*own.values()]), strict=True))
        return outputs

    def send_weights(self, send: SendWeights | None, dtype: torch.dtype, *, share: bool = False) -> None:
        """Gather the weights tensor by tensor and pass them to rank 0's `send`.

        Args:
            send: None on other ranks.
            dtype: dtype of the tensors.
            share: share every rank's copy of the tensors with other processes on its GPU (CUDA IPC).
        """
        weights = stream_weights(self.policy, dtype)
        handles: Mapping[str, IpcHandle] = {}
        if share:
            with must_fit("for the buffer that shares weights with servers; lower rollout.gpu_memory_utilization"):
                buffer = IpcBuffer(weight_specs(self.policy, dtype), self.ranks, self.policy.device)
            weights, handles = buffer.stage(weights), buffer.handles
        try:
            if send is not None:
                send(weights, handles)
        finally:  # gathering is a collective: finish it even if sending failed
            deque(weights, maxlen=0)

    def gpu(self) -> str | None:
        """Return the UUID of this rank's GPU; None on CPU."""
        return gpu_uuid(self.policy.device) if self.policy.device.type == "cuda" else None

    def forward_backward(
        self, batch: TrainBatch | None, model: TrainedModel, coefficients: Coefficients
    ) -> TrainResult:
        """Compute the gradient of a step.

        Args:
            batch: this rank's batch; None repeats the previous batch of the model for another update.
            model: which model.
            coefficients: coefficients of the policy loss's regularizers.

        Raises:
            StopRequested: a signal stopped the run; no weight was changed.
        """
        may_stop = batch is not None and (model == "critic" or self.critic is None)  # the critic is updated first
        with self.memory.phase("train"):
            return self.engines[model].forward_backward(batch, self._loss(model, coefficients), may_stop=may_stop)

    def optim_step(self, model: TrainedModel) -> OptimResult:
        """Update a model's weights and free its gradient.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are unchanged.
        """
        # critic updates count as phase train, for memory as for time
        with (
            self.memory.phase("optim" if model == "policy" else "train"),
            must_fit(
                "in the optimizer step: weights, gradients and optimizer state do not fit together; use more "
                "processes, or model.dtype: bfloat16"
            ),
        ):
            return self.engines[model].optim_step()

    def refresh_reference(self, mix: float) -> None:
        """Interpolate the reference towards the policy: reference += mix * (policy - reference)."""
        self.engine.refresh_reference(mix)

    def save(self, root: Path, state: TrainerState, *, keep: int) -> None:
        """Write the checkpoint `root/step-N` and delete all but the last `keep`.

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
            save_policy(self.policy, self.tokenizer, folder, self.ranks, self.save_options)

    @torch.no_grad()
    def load_model(self, folder: Path) -> None:
        """Load the weights (or those of the adapter) that `save_model` wrote.

        Raises:
            TrainingError: they are of another model.
        """
        adapter, master_weights = self.policy.adapter, self.policy.master_weights
        try:
            stored = stored_weights(folder if adapter is None else folder / WEIGHTS_FILE, field=str(folder))
            sources = map_to_model(self.policy.model, stored) if adapter is None else stored
            if not stored or sources is None:
                what = "weights to load" if not stored else "weights that can be loaded tensor by tensor"
                raise TrainingError(f"{folder}: has no {what}")
            own = named_saved_tensors(self.policy.model) if adapter is None else adapter.tensors().items()
            for name, tensor in own:
                if name not in sources:
                    raise TrainingError(f"{folder}: has no weight {name}; it is of another model")
                rows, first = local_rows(tensor)
                master = None if master_weights is None else master_weights.of(name)
                into = rows if master is None else local_rows(master)[0]
                sources[name].read_rows(into, first)
                if master is not None:
                    rows.copy_(into)
        except UserError as error:
            raise TrainingError(str(error)) from error

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, for servers to load.

        Raises:
            TrainingError: the disk is full.
        """
        assert self.policy.adapter is not None, "there is no adapter"
        weights = self.policy.adapter.full_weights()
        if self.ranks.is_rank0:
            with disk_errors(folder):
                self.policy.adapter.save(folder, weights)

    def engine_state(self) -> dict[str, Any]:
        """Return the state of all optimizers for a checkpoint."""
        return self.engine.state_dict() | ({} if self.critic is None else {"critic": self.critic.state_dict()})

    def load_engine_state(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `engine_state`."""
        self.engine.load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    def find_budget(self, shard: WorstCaseShard, max_tokens: int) -> int:
        """Find the largest `train.micro_batch_tokens` that fits on every rank, for `auto`.

        Policy, critic and both optimizers are in memory at the same time.

        Args:
            shard: a rank's largest shard of a step, from which trial batches are made.
            max_tokens: upper limit.
        """
        coefficients = self.algorithm.coefficients(self.algorithm.initial_coefficients)
        state_bytes = {model: engine.num_device_state_bytes for model, engine in self.engines.items()}
        for model, engine in self.engines.items():
            max_tokens = find_budget(
                engine,
                self._loss(model, coefficients),
                shard=shard,
                max_tokens=max_tokens,
                reserved_bytes=sum(state_bytes.values()) - state_bytes[model],
            )
        return max_tokens

    def peak_memory(self) -> dict[str, int]:
        """Return peak bytes by phase since the last call, and since the start."""
        return self.memory.take()

    def _loss(self, model: TrainedModel, coefficients: Coefficients) -> PerTokenLoss:
        if model == "policy":
            return self.algorithm.loss_with(coefficients)
        assert self.algorithm.critic is not None, "the algorithm has no critic"
        return self.algorithm.critic.loss


def _to_host(tensors: Sequence[Tensor]) -> list[FloatArray]:
    """Copy tensors [C] to the host in one transfer."""
    if not tensors:
        return []
    ends = np.cumsum([len(tensor) for tensor in tensors])
    return np.split(torch.cat([*tensors]).double().cpu().numpy(), ends[:-1])


def sample(workers: WorkerGroup[Worker], requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
    """Sample completions in equal shares on all ranks. All requests have the same purpose."""
    shares = split_requests(requests, workers.ranks.dp_size)
    sampled = workers.scatter(Worker.sample, shares, requests[0].keys[0].purpose)
    return [completion for share in sampled for completion in share.unpack()]


@dataclass(frozen=True, slots=True)
class RewardRanks:
    """All ranks, as the runner of rewards sees them (`OnRanks`)."""

    workers: WorkerGroup[Worker]

    @property
    def count(self) -> int:
        """Number of shares."""
        return self.workers.ranks.dp_size

    def __call__(self, shares: Sequence[Sequence[GroupCalls]], progress: TrainerProgress) -> list[list[GroupValues]]:
        """Score each rank's share there."""
        return self.workers.scatter(Worker.score_groups, shares, progress)


def pack_batches(
    engine: TrainEngine, sequences: Sequence[TrainSequence], *, sequence_level: bool = False
) -> tuple[TrainBatch, ...]:
    """Pack a step's sequences into one batch per rank, under the engine's current token budget.

    Args:
        engine: gives the token budget and the layout.
        sequences: sequences of a step.
        sequence_level: keep each trajectory's sequences in one micro-batch, for losses that sum over a trajectory.
    """
    return pack(
        sequences,
        micro_batch_tokens=engine.budget.tokens,
        dp_size=engine.ranks.dp_size,
        share_prompts=engine.policy.shares_prompts,
        padded=engine.policy.layout == "padded",
        sequence_level=sequence_level,
    )


def run_forward_only(
    workers: WorkerGroup[Worker], sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyField]
) -> ForwardOnlyOutputs:
    """Compute the `wanted` logprobs, entropies and values of a step's sequences, without gradient, on all ranks."""
    if not wanted:
        return ForwardOnlyOutputs()
    parts = workers.scatter(Worker.forward_only, pack_batches(workers.local.engine, sequences), wanted)
    return ForwardOnlyOutputs(**{name: {i: x for part in parts for i, x in part[name].items()} for name in wanted})


def with_first_pass(
    workers: WorkerGroup[Worker], sequences: Sequence[TrainSequence], outputs: ForwardOnlyOutputs
) -> ForwardOnlyOutputs:
    """Complete forward-only outputs of some of a step's sequences with what its first pass computed for them."""
    found: dict[ForwardOnlyField, dict[int, FloatArray]] = {}
    for part in workers.call(Worker.first_pass_outputs, {s.index for s in sequences}):
        for name, by_sequence in part.items():
            found.setdefault(name, {}).update(by_sequence)
    return replace(outputs, **{name: {**values, **getattr(outputs, name)} for name, values in found.items()})


def keep_waiting(workers: WorkerGroup[Worker]) -> None:
    """Renew the other ranks' deadlines if they are due. Called regularly while rank 0 waits.

    Raises:
        StopRequested: the run was asked to stop.
    """
    workers.ranks.stop.check()
    if workers.ranks.world_size > 1 and workers.seconds_idle() > workers.ranks.timeout_s / 4:
        workers.call(Worker.ping)


@dataclass(frozen=True, slots=True)
class TrainingWorkers:
    """The workers of all ranks, as rollout engines see them (`TrainingProcesses`)."""

    workers: WorkerGroup[Worker]

    @property
    def policy(self) -> Policy:
        """The policy, as rank 0 has it."""
        return self.workers.local.policy

    @property
    def num_updates(self) -> int:
        """Optimizer steps done: the policy version of the current weights."""
        return self.workers.local.engine.updates_done

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        """Sample completions in equal shares on all ranks."""
        return sample(self.workers, requests)

    def send_weights(self, send: SendWeights, dtype: torch.dtype, *, share: bool = False) -> None:
        """Gather the weights tensor by tensor and pass them to `send`; see `Worker.send_weights`."""
        self.workers.call_with_local(Worker.send_weights, send, dtype, share=share)

    def save_adapter(self, folder: Path) -> None:
        """Write the trained adapter as a folder. Raises `TrainingError` if the disk is full."""
        self.workers.call(Worker.save_adapter, folder)

    def gpus(self) -> frozenset[str]:
        """Return the UUIDs of the ranks' GPUs; none on CPU."""
        return frozenset(gpu for gpu in self.workers.call(Worker.gpu) if gpu)

    def empty_cache(self) -> None:
        """Release the GPU memory that PyTorch caches on all ranks."""
        self.workers.call(Worker.empty_cache)

    def keep_alive(self) -> None:
        """Renew the other ranks' deadlines if they are due."""
        keep_waiting(self.workers)
