"""The parts of a run that every rank has, and how rank 0 has them all do the same thing at the same time.

Rank 0 runs the training loop. The other ranks wait for a command, do it together with rank 0, and hand back a result.
With one process there is nobody to tell, and a command is a call.
"""

import time
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
from cohort.errors import OutOfStepError, TrainingError
from cohort.metrics import PeakMemory, PhaseClock, largest_peaks
from cohort.packing import pack
from cohort.policy import Policy, Saving, stream_weights, weight_specs
from cohort.records import Estimate, Estimates, FloatArray, TrainSequence
from cohort.rollout import Sampled, Sampler, SampleRequest, SamplingParams, StreamKey, merge_shares, split_requests
from cohort.rollout.vllm import Lender, describe_device

# verb -> phase of a step
_PHASES = {"sample": "rollout", "forward_backward": "train", "train_critic": "train", "optim_step": "optim"}


@dataclass(slots=True, kw_only=True, eq=False)
class Crew:
    """The same parts on every rank. Public methods are rank 0's; what they call runs on every rank."""

    ranks: Ranks
    policy: Policy
    algorithm: Algorithm
    engine: TrainEngine
    critic: CriticEngine | None = None  # None: the algorithm has none
    critic_updates: int = 1  # for each one of the policy
    sampler: Sampler
    tokenizer: Any  # rank 0's; None elsewhere
    memory: PeakMemory
    saving: Saving = field(default_factory=Saving)  # how weights are written
    moving: PhaseClock = field(default_factory=PhaseClock)  # time of handing data from rank to rank
    _send: Callable[[Iterator[tuple[str, Tensor]], Mapping[str, Any]], None] | None = None  # rank 0's, while it sends
    _told_at: float = field(default_factory=time.monotonic)  # when the others were last told something

    def sample(
        self, requests: Sequence[SampleRequest], sampling: SamplingParams, key: StreamKey
    ) -> list[tuple[Sampled, ...]]:
        """The completions of each request, sampled in equal shares by all ranks."""
        shares = split_requests(requests, self.ranks.world_size)
        return merge_shares(requests, self._all("sample", shares, sampling=sampling, key=key))

    def pack(self, sequences: Sequence[TrainSequence]) -> tuple[TrainBatch, ...]:
        """A step's sequences as one batch per rank for the policy, under the budget as it is now."""
        return self._packed_for(self.engine, sequences)

    def pack_for_critic(self, sequences: Sequence[TrainSequence]) -> tuple[TrainBatch, ...]:
        """The same for the critic; nothing without one."""
        return () if self.critic is None else self._packed_for(self.critic, sequences)

    def _packed_for(self, engine: TrainEngine, sequences: Sequence[TrainSequence]) -> tuple[TrainBatch, ...]:
        return pack(
            sequences,
            micro_batch_tokens=engine.micro_batch_tokens,
            world_size=self.ranks.world_size,
            share_prompts=engine.policy.shares_prompts,
            padded=engine.policy.layout == "padded",
        )

    def keep_waiting(self) -> None:
        """To be called from time to time while rank 0 waits for something else: the others' deadlines begin anew."""
        if self.ranks.world_size > 1 and time.monotonic() - self._told_at > self.ranks.timeout_s / 4:
            self._all("keep_waiting")

    def free_cache(self) -> None:
        """Give back the GPU memory that PyTorch keeps for later, on all ranks."""
        self._all("free_cache")

    def estimate(self, sequences: Sequence[TrainSequence], wanted: Set[Estimate]) -> Estimates:
        """What the models say of the completions before they are trained on, computed by all ranks.

        Args:
            sequences: of a step.
            wanted: which of it; nothing is computed for the rest.
        """
        if not wanted:
            return Estimates()
        shares = [batch.sequences for batch in self.pack(sequences)]
        parts = self._all("estimate", shares, wanted=wanted)
        return Estimates(**{name: {i: x for part in parts for i, x in part[name].items()} for name in wanted})

    def send_weights(
        self,
        dtype: torch.dtype,
        send: Callable[[Iterator[tuple[str, Tensor]], Mapping[str, Any]], None],
        *,
        lend: bool = False,
    ) -> None:
        """Gather the weights one by one, and hand them to rank 0's `send`.

        Args:
            dtype: to convert them to.
            send: gets names, as in a saved model folder, with whole tensors; and how to open what the ranks lend, by
                GPU.
            lend: every rank lends its own copy of the tensors to other processes on its GPU.
        """
        self._send = send
        try:
            self._all("send_weights", dtype=dtype, lend=lend)
        finally:
            self._send = None

    def gpus(self) -> list[str]:
        """The GPU of every rank, by UUID; none on a CPU."""
        return [gpu for gpu in self._all("gpu") if gpu is not None]

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, for whoever samples with it.

        Raises:
            TrainingError: the disk is full.
        """
        self._all("save_adapter", folder=folder)

    def forward_backward(self, batches: Sequence[TrainBatch] | None, coefficients: Coefficients) -> TrainResult:
        """The gradient of a step.

        Args:
            batches: one per rank; None for another update on the same ones.
            coefficients: of the loss's terms.

        Raises:
            StopRequested: the run was asked to end; no weight was changed.
        """
        return self._all("forward_backward", batches, coefficients=coefficients)[0]

    def refresh_reference(self, mix: float) -> None:
        """Move the reference towards the policy, by `mix` of the way."""
        self._all("refresh_reference", mix=mix)

    def train_critic(self, batches: Sequence[TrainBatch] | None) -> TrainResult:
        """The updates of the critic that go with one of the policy, gradient and optimizer step; nothing without one.

        Args:
            batches: one per rank, of `pack_for_critic`; None for more updates on the same ones.

        Returns:
            metrics as means over the updates, and counts of all of them.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
            StopRequested: the run was asked to end; no weight was changed.
        """
        return TrainResult.nothing() if self.critic is None else self._all("train_critic", batches)[0]

    def optim_step(self) -> OptimResult:
        """One optimizer step.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
        """
        return self._all("optim_step")[0]

    def save(self, root: Path, state: TrainerState, *, keep: int) -> None:
        """Write the checkpoint `root/step-N` and delete all but the last `keep` ones.

        Raises:
            TrainingError: the disk is full.
        """
        self._all("save", root=root, state=state, keep=keep)

    def save_model(self, folder: Path) -> None:
        """Write the model and its tokenizer."""
        self._all("save_model", folder=folder)

    def find_budget(self, share: LargestShare, most_tokens: int) -> int:
        """`train.micro_batch_tokens: auto`: the most that fits on every rank.

        Args:
            share: of every rank in a step; the trials are made of its groups.
            most_tokens: more than this there never is to compute at a time.
        """
        return self._all("find_budget", share=share, most_tokens=most_tokens)[0]

    def seconds_moving(self) -> float:
        """Time that rank 0 has spent handing data to and from the others since the last call."""
        return self.moving.take().get("time/move_s", 0.0)

    def peak_memory(self) -> dict[str, int]:
        """Peak bytes by phase since the last call, and since the start; of each the largest of all ranks."""
        return largest_peaks(self._all("peak_memory"))

    def stop(self) -> None:
        """Let the other ranks go."""
        if self.ranks.world_size > 1:
            self.ranks.command(None)

    def serve(self) -> None:
        """On the ranks other than 0: do what rank 0 says until it stops."""
        command: tuple[str, bool, dict[str, Any]] | None
        while (command := self.ranks.command()) is not None:
            verb, has_shares, arguments = command
            self._do(verb, None, has_shares, arguments)

    def _all(self, verb: str, shares: Sequence[Any] | None = None, **arguments: Any) -> list[Any]:
        """Every rank's result of a verb, by rank.

        Args:
            verb: name of a method, with `_on_rank` added.
            shares: what is different for each rank, if anything is.
            arguments: the same for all.
        """
        if self.ranks.world_size > 1:
            self.ranks.command((verb, shares is not None, arguments))
        self._told_at = time.monotonic()
        results = self._do(verb, shares, shares is not None, arguments)
        assert results is not None, "rank 0 gathers"
        for result in results:
            if isinstance(result, TrainingError):
                raise result
        return results

    def _do(
        self, verb: str, shares: Sequence[Any] | None, has_shares: bool, arguments: Mapping[str, Any]
    ) -> list[Any] | None:
        with self.moving.phase("move"):
            share = (self.ranks.scatter(shares),) if has_shares else ()
        try:
            with self._phase(verb, arguments):
                result = getattr(self, f"_{verb}_on_rank")(*share, **arguments)
        except OutOfStepError:
            raise  # the others are waiting inside of the verb: this process has to end
        except TrainingError as error:
            result = error  # the run ends in good order, with rank 0
        self.ranks.largest(0)  # waiting for the slowest is not moving data
        with self.moving.phase("move"):
            return self.ranks.gather(result)

    def _phase(self, verb: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """The phase of a step that a verb is, as the metrics name it. Sampling for an evaluation is none of it."""
        if verb not in _PHASES or (verb == "sample" and arguments["key"].purpose != "train"):
            return nullcontext()
        return self.memory.phase(_PHASES[verb])

    def _sample_on_rank(
        self, requests: Sequence[SampleRequest], *, sampling: SamplingParams, key: StreamKey
    ) -> list[tuple[Sampled, ...]]:
        with must_fit(
            "while sampling, for which every process needs the whole model and the cache of rollout.max_num_seqs "
            "completions; lower rollout.max_num_seqs or rollout.max_completion_tokens"
        ):
            return self.sampler.sample(requests, sampling, key)

    def _keep_waiting_on_rank(self) -> None:
        pass

    def _free_cache_on_rank(self) -> None:
        torch.cuda.empty_cache()

    def _estimate_on_rank(
        self, sequences: Sequence[TrainSequence], *, wanted: Set[Estimate]
    ) -> dict[Estimate, dict[int, FloatArray]]:
        estimates = self.engine.estimate(sequences, wanted - {"values"})
        if "values" in wanted:
            assert self.critic is not None, "an algorithm that asks for values was built without a critic"
            estimates |= self.critic.estimate(sequences, {"values"})
        return {name: {i: x.double().cpu().numpy() for i, x in of.items()} for name, of in estimates.items()}

    def _send_weights_on_rank(self, *, dtype: torch.dtype, lend: bool) -> None:
        weights = stream_weights(self.policy, dtype)
        handles: Mapping[str, Any] = {}
        if lend:
            with must_fit("for the buffer in which weights are lent to vLLM; lower rollout.gpu_memory_utilization"):
                lender = Lender(weight_specs(self.policy, dtype), self.ranks, self.policy.device)
            weights, handles = lender.stage(weights), lender.handles
        try:
            if self._send is not None:
                self._send(weights, handles)
        finally:  # the other ranks take part in all of it, whatever has become of the receivers
            deque(weights, maxlen=0)

    def _gpu_on_rank(self) -> str | None:
        return describe_device(self.policy.device)["gpu"]

    def _forward_backward_on_rank(self, batch: TrainBatch | None = None, *, coefficients: Coefficients) -> TrainResult:
        may_stop = batch is not None and self.critic is None  # which has been updated in this step already
        result = self.engine.forward_backward(batch, self.algorithm.loss_at(coefficients), may_stop=may_stop)
        self._keep_one_budget()
        return result

    def _refresh_reference_on_rank(self, *, mix: float) -> None:
        self.engine.refresh_reference(mix)

    def _optim_step_on_rank(self) -> OptimResult:
        with _update_must_fit():
            return self.engine.optim_step()

    def _train_critic_on_rank(self, batch: TrainBatch | None = None) -> TrainResult:
        """The gradient is gone before the policy's is there: memory never has both."""
        assert self.critic is not None and self.algorithm.critic is not None
        total = TrainResult.nothing()
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

    def _keep_one_budget(self) -> None:
        """What has run out of memory for one model is the budget of both: it is one number in a checkpoint."""
        if self.critic is not None:
            smaller = min(self.engine.micro_batch_tokens, self.critic.micro_batch_tokens)
            self.engine.micro_batch_tokens = self.critic.micro_batch_tokens = smaller

    def _save_on_rank(self, *, root: Path, state: TrainerState, keep: int) -> None:
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

    def _save_model_on_rank(self, *, folder: Path) -> None:
        with disk_errors(folder):
            save_model(self.policy, self.tokenizer, folder, self.ranks, self.saving)

    def engine_state(self) -> dict[str, Any]:
        """The state of all optimizers, for a checkpoint. Every rank calls this."""
        return self.engine.state_dict() | ({} if self.critic is None else {"critic": self.critic.state_dict()})

    def load_engine_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `engine_state` gave. Every rank calls this."""
        self.engine.load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    def _save_adapter_on_rank(self, *, folder: Path) -> None:
        assert self.policy.adapter is not None, "nothing else is saved by itself"
        weights = self.policy.adapter.whole_weights()
        if self.ranks.is_first:
            with disk_errors(folder):
                self.policy.adapter.save(folder, weights)

    def _find_budget_on_rank(self, *, share: LargestShare, most_tokens: int) -> int:
        """The critic and its optimizer are there while the policy is trained, and the other way round."""
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

    def _peak_memory_on_rank(self) -> dict[str, int]:
        return self.memory.take()


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
