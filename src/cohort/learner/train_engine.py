"""The training engine: compute gradients with `forward_backward`, update weights with `optim_step`.

T loss tokens of a micro-batch, C of one sequence.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from cohort.config import AdamwConfig, OptimConfig, TrainConfig
from cohort.errors import StopRequested, TrainingError
from cohort.learner.forward_backward import (
    ForwardBackward,
    GradientAccumulation,
    LocalAccumulation,
    Operation,
    ShardedAccumulation,
    StepSchedule,
    zero_gradient,
)
from cohort.learner.forward_only import ForwardOnly
from cohort.learner.loss import (
    AnyStepLoss,
    PerSequence,
    PerTokenLoss,
    StepLoss,
    TrainResult,
    ValueStepLoss,
    per_sequence,
)
from cohort.learner.memory_fallback import TokenBudget, must_fit, repack
from cohort.learner.optimizer import Optimizers
from cohort.learner.optimizer_offload import to_local
from cohort.learner.router_aux_loss import RouterAuxLoss
from cohort.models import Critic, Policy
from cohort.packing.batch import Sequences, TrainBatch
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.records import ForwardOnlyField, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """Result of an optimizer step."""

    grad_norm: float  # before clipping
    learning_rate: float


# Between the passes of a step: another micro-batch follows, gradients are clipped, or weights are updated
UpdateEvent = Literal["substep_end", "pre_optimizer_step", "optimizer_step"]
_NO_BATCH = TrainBatch(micro_batches=(), micro_batch_tokens=0, num_trajectories=0, num_loss_tokens=0, num_over_budget=0)


class TrainEngine:
    """Train a policy: holds the model, its optimizer and, for a KL term, the reference."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        optim: OptimConfig | None = None,
        *,
        budget: TokenBudget,
        learning_rate: Callable[[int], float],
        temperature: float,
        reference: Policy | None,
        reference_in_loss: bool = True,
        reference_changes: bool = False,
        ranks: Ranks = SINGLE_PROCESS,
    ):
        """Create the optimizer.

        Args:
            policy: trained in place.
            config: the `train` section.
            optim: the `optim` section; AdamW by default.
            budget: token budget of the batches; halved on out-of-memory.
            learning_rate: number of updates done -> learning rate of the next.
            temperature: sampling temperature, which also divides the logits of the loss.
            reference: frozen model of the KL divergence.
            reference_in_loss: whether the loss needs the reference's logprobs; otherwise only `forward_only` does.
            reference_changes: whether `refresh_reference` is called, so that its weights are part of the state.
            ranks: ranks of the run. All of them call the same methods in the same order.
        """
        self.policy = policy
        self.budget = budget
        self.updates_done = 0
        self.on_event: Callable[[UpdateEvent], object] | None = None  # called on this rank
        self._config = config
        self._learning_rate = learning_rate
        self._temperature = temperature
        self.ranks = ranks
        self._batch = _NO_BATCH
        self.old_outputs: dict[int, Tensor] = {}  # sequence index -> [C], of the first pass over the batch
        self._old_entropies: dict[int, Tensor] = {}  # likewise
        self._reference_logprobs: dict[int, Tensor] | None = None
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._accumulation: GradientAccumulation = (
            LocalAccumulation(*policy.embeddings_and_head())
            if policy.sharding is None
            else ShardedAccumulation(policy.sharding, ranks.dp_shard)
        )
        forward_only = partial(
            ForwardOnly, accumulation=self._accumulation, budget=budget, ranks=ranks, temperature=temperature
        )
        self._policy_forward = forward_only(policy)
        self.reference = reference
        self._reference_changes = reference_changes
        self.reference_in_loss = reference is not None and reference_in_loss
        self._reference_forward = None if reference is None else forward_only(reference)
        self.optimizer = Optimizers(
            policy.model, optim or AdamwConfig(), master_weights=policy.master_weights, seed=config.seed
        )
        self._router_aux_loss = RouterAuxLoss(policy, aux) if (aux := config.router_aux_loss_coef) else None

    def forward_backward(
        self,
        batch: TrainBatch | None,
        per_token_loss: PerTokenLoss,
        *,
        old_logprobs: Mapping[int, Tensor] | None = None,
        may_stop: bool = False,
    ) -> TrainResult:
        """Compute the gradient of `sum(loss_weight * per_token_loss)` over the whole step, replacing earlier gradients.

        If a micro-batch runs out of memory on any rank, all ranks retry with at most half the token budget, which
        stays reduced.

        Args:
            batch: this rank's micro-batches; the sum does not depend on the split. None for another update on the
                last batch, whose old logprobs are those of its first pass.
            per_token_loss: unreduced loss.
            old_logprobs: sequence index -> [C], of an earlier policy. By default the current policy is the old one in
                the first pass over a batch.
            may_stop: whether the step can be abandoned without losing anything.

        Raises:
            DoesNotFitError: a single sequence does not fit into memory.
            StopRequested: the run was asked to stop, and `may_stop`. Every rank raises it.
        """
        if batch is not None:
            self._batch, self.old_outputs, self._old_entropies = batch, dict(old_logprobs or {}), {}
        if self._batch.micro_batch_tokens > self.budget.tokens:  # halved after the batch was packed
            self._repack()
        is_old = batch is not None and old_logprobs is None
        num_out_of_memory = 0
        while True:
            self.policy.model.zero_grad()
            self._accumulation.begin()
            if batch is not None and self.reference_in_loss:
                num_out_of_memory += self._compute_reference_logprobs(may_stop)
            router_metrics, router_out_of_memory = self._count_routing(may_stop)
            passes = self._start_passes(per_token_loss, is_old=is_old)
            num_micro_batches, failures = self._run_schedule(passes, may_stop=may_stop)
            num_out_of_memory += router_out_of_memory + failures
            if num_micro_batches is not None:
                break
            del passes  # with its open prefix
            self._accumulation.reset()
            self.budget.tokens = int(self.ranks.all_reduce_min(self.budget.tokens))
            self._repack()
        if num_micro_batches:
            self._accumulation.finish()
        if is_old:
            self.old_outputs, self._old_entropies = passes.outputs, passes.entropies
        passes.metrics.count({"num_out_of_memory": num_out_of_memory})
        metrics, counts = passes.metrics.reduce(self.ranks, num_tokens=self._batch.num_loss_tokens)
        return TrainResult(metrics={**metrics, **router_metrics}, num_micro_batches=num_micro_batches, **counts)

    def _compute_reference_logprobs(self, may_stop: bool) -> int:
        """Compute the reference's logprobs of the batch; return the number of out-of-memory errors."""
        assert self._reference_forward is not None, "the loss needs a reference"
        result = self._reference_forward.compute(self._batch.sequences, may_stop=may_stop)
        self._reference_logprobs = dict(result.logprobs)
        return result.num_out_of_memory

    def _start_passes(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> ForwardBackward:
        """Start from the first micro-batch of the step."""
        self.policy.model.train()
        # dropout, if any, depends only on the update and the rank
        torch.manual_seed(_seed(self._config.seed, self.updates_done, self.ranks.dp_rank))
        return ForwardBackward(
            self._step_loss(per_token_loss, is_old=is_old), self._accumulation, self._router_aux_loss
        )

    def _count_routing(self, may_stop: bool) -> tuple[dict[str, float], int]:
        """Count the routers' choices over the whole step, which their loss needs before the first micro-batch.

        Returns:
            Metrics of the routers, and the number of out-of-memory errors.
        """
        routers = self._router_aux_loss
        if routers is None:
            return {}, 0
        sequences = self._batch.sequences
        self.policy.model.eval()
        routers.begin_count()
        result = self._policy_forward.compute(sequences, may_stop=may_stop, context=routers.count_pass)
        return routers.finish_count(sequences, self.ranks), result.num_out_of_memory

    def _run_schedule(self, passes: ForwardBackward, *, may_stop: bool) -> tuple[int | None, int]:
        """Run all operations of the batch together with the other ranks.

        Args:
            passes: runs them.
            may_stop: whether the step can be abandoned.

        Returns:
            The number of micro-batches, or None if any rank ran out of memory; and how often this rank did.
        """
        schedule = StepSchedule(self._batch)
        num_micro_batches = 0
        while (operation := schedule.next_operation(self.ranks, may_stop=may_stop)) is not Operation.DONE:
            match operation:
                case Operation.STOP:  # between passes no weights are gathered and no collectives are pending
                    self.policy.model.zero_grad()
                    raise StopRequested("before the step changed anything")
                case Operation.RETRY:
                    return None, int(schedule.out_of_memory)
                case Operation.PREFIX_FORWARD:
                    failure = passes.prefix_forward(schedule.open_prefix())
                case Operation.MICRO_BATCH:
                    if num_micro_batches:
                        self._notify("substep_end")
                    num_micro_batches += 1
                    sequences, continues_prefix = schedule.next_micro_batch()
                    self._accumulation.set_last(schedule.is_last)
                    failure = passes.micro_batch(sequences, continues_prefix=continues_prefix)
                case Operation.PREFIX_BACKWARD:
                    schedule.close_prefix()
                    self._accumulation.set_last(schedule.is_last)
                    failure = passes.prefix_backward()
            if failure is not None:
                schedule.out_of_memory = True
                self.budget.tokens = failure.halve(self.budget.tokens)
        return num_micro_batches, 0

    def _repack(self) -> None:
        """Repack the batch under the current token budget, keeping old and reference logprobs."""
        self._batch, (self.old_outputs, reference) = repack(
            self._batch,
            (self.old_outputs, self._reference_logprobs or {}),
            policy=self.policy,
            ranks=self.ranks,
            micro_batch_tokens=self.budget.tokens,
        )
        self._reference_logprobs = reference if self.reference_in_loss else None

    @property
    def num_state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, on the device or on the host."""
        return self.optimizer.state_bytes()

    @property
    def num_device_state_bytes(self) -> int:
        """Bytes of this rank's optimizer state on the device."""
        return 0 if self.policy.state_on_host else self.num_state_bytes

    def fits(self, sequences: Sequences, per_token_loss: PerTokenLoss, *, reserved_bytes: int = 0) -> bool:
        """Try a micro-batch; return whether it fits into the memory of every rank. Weights do not change.

        Every rank calls this, before the first step.

        Args:
            sequences: sequences of the micro-batch, with loss weight 0.
            per_token_loss: loss of the run.
            reserved_bytes: memory to leave free for something that is not allocated yet.
        """
        self.policy.model.train()
        state_bytes = self.num_device_state_bytes + reserved_bytes
        gigabytes = f"{state_bytes / 1e9:.1f} GB for the optimizer's state alone"
        with must_fit(f"for model, gradients and optimizer ({gigabytes}); use more processes"):
            # every micro-batch but the first finds gradients, and every step but the first the optimizer's state
            reserved = torch.empty(state_bytes, dtype=torch.uint8, device=self.policy.device)
            for parameter in self._parameters if not self._accumulation.keeps_whole_gradients else ():
                parameter.grad = zero_gradient(parameter)
        if self.reference_in_loss:
            zeros = torch.zeros(sum(s.num_loss_tokens for s in sequences), device=self.policy.device)
            self._reference_logprobs = dict(per_sequence(zeros, sequences))
        passes = ForwardBackward(
            self._step_loss(per_token_loss, is_old=True), self._accumulation, self._router_aux_loss
        )
        if self._accumulation.keeps_whole_gradients:
            self._accumulation.set_last(False)
            passes.micro_batch(())
        self._accumulation.set_last(True)
        fits = passes.micro_batch(sequences) is None
        del reserved
        self.policy.model.zero_grad()
        self.old_outputs, self._reference_logprobs = {}, None
        return self.ranks.all_reduce_min(fits) == 1

    def forward_only(
        self, sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyField]
    ) -> dict[ForwardOnlyField, PerSequence]:
        """Run forward-only passes over this rank's sequences. Every rank calls this.

        Args:
            sequences: sequences of this rank; ranks may have different numbers of them.
            wanted: names of the results, the same on every rank.

        Returns:
            For each name: sequence index -> [C].

        Raises:
            DoesNotFitError: a single sequence does not fit into memory.
        """
        outputs: dict[ForwardOnlyField, PerSequence] = {}
        if wanted & {"logprobs", "entropies"}:
            self.policy.model.eval()
            policy_result = self._policy_forward.compute(sequences, entropy="entropies" in wanted)
            outputs |= {"logprobs": policy_result.logprobs, "entropies": policy_result.entropies}
        if "reference_logprobs" in wanted:
            assert self._reference_forward is not None, "the algorithm needs a reference"
            of_reference = self._reference_forward.compute(sequences)
            outputs["reference_logprobs"] = of_reference.logprobs
        return {name: outputs[name] for name in wanted}

    def first_pass_outputs(self) -> dict[ForwardOnlyField, PerSequence]:
        """Return what the first pass over the last batch computed anyway, for this rank's sequences.

        Returns:
            For each name: sequence index -> [C], by the weights before the update. The reference's logprobs are empty
            unless the loss needs them.
        """
        return {
            "logprobs": self.old_outputs,
            "entropies": self._old_entropies,
            "reference_logprobs": self._reference_logprobs or {},
        }

    def optim_step(self) -> OptimResult:
        """Clip the gradient, update the weights, and clear the gradient.

        If the gradient or the learning rate is 0, weights and optimizer state do not change: neither momentum nor
        weight decay is applied. An optimizer of the user's own decides itself what a learning rate of 0 means.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are unchanged. Every rank raises it.
        """
        scheduled = self._learning_rate(self.updates_done)
        learning_rate = self.optimizer.set_learning_rate(scheduled)
        for parameter in self._parameters:
            if parameter.grad is None:  # no token of the step used this weight
                parameter.grad = zero_gradient(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"gradient norm is {grad_norm} at optimizer step {self.updates_done + 1}; weights are unchanged; lower "
                f"train.learning_rate (now {learning_rate:.3g}) or inspect the completions"
            )
        self._notify("pre_optimizer_step")
        custom = self.optimizer.custom
        if grad_norm > 0 and (scheduled > 0 or custom is not None):
            self.optimizer.step(scheduled, update=self.updates_done)
        self._notify("optimizer_step")
        if custom is not None:
            custom.advance()
        self.policy.model.zero_grad()
        self.updates_done += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def _notify(self, event: UpdateEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    @torch.no_grad()
    def refresh_reference(self, mix: float) -> None:
        """Update the reference to mix * policy + (1 - mix) * reference (arXiv:2404.09656). Every rank calls this."""
        assert self.reference is not None, "there is no reference to refresh"
        policy_parameters = dict(self.policy.model.named_parameters())
        for name, parameter in self.reference.model.named_parameters():
            to_local(parameter).lerp_(to_local(policy_parameters[name]).to(to_local(parameter).device), mix)

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer state and counters, and the weights of a reference that changes.

        Any number of ranks can load it. The policy's weights are saved separately, as a model folder.
        """
        state = {"optimizer": self.optimizer.state_dict(), "updates_done": self.updates_done}
        if self.reference is not None and self._reference_changes:
            state["reference"] = get_model_state_dict(self.reference.model)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates_done = state["updates_done"]
        if self.reference is not None and self._reference_changes:
            set_model_state_dict(self.reference.model, state["reference"])

    def _step_loss(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> AnyStepLoss:
        """Make the loss of the step; `is_old`: the current policy is the old policy."""
        return StepLoss(
            policy=self.policy,
            policy_loss=per_token_loss,
            temperature=self._temperature,
            old_logprobs=None if is_old else self.old_outputs,
            reference_logprobs=self._reference_logprobs,
            gradients_in_forward=self._config.gradients_in_forward,
        )


def _seed(*parts: int) -> int:
    """Derive a seed for the process-wide generator."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class CriticEngine(TrainEngine):
    """Train a critic on sequences with returns; its loss takes `ValueInputs`.

    `old_outputs` are the old values.
    """

    policy: Critic

    def forward_only(
        self, sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyField]
    ) -> dict[ForwardOnlyField, PerSequence]:
        """Compute the values of this rank's sequences; see `TrainEngine.forward_only`."""
        assert wanted == {"values"}, "a critic computes only values"
        return {"values": super().forward_only(sequences, {"logprobs"})["logprobs"]}

    def _step_loss(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> ValueStepLoss:
        old_values = None if is_old else self.old_outputs
        return ValueStepLoss(policy=self.policy, value_loss=per_token_loss, old_values=old_values)
