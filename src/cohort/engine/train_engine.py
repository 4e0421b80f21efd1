"""Gradients and updates. Few verbs: `forward_backward`, `optim_step`, `state_dict`, `load_state_dict`.

T loss tokens of a micro-batch, C of one sequence.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from cohort.batch import TrainBatch
from cohort.config import AdamwConfig, OptimConfig, TrainConfig
from cohort.distributed import ALONE, Ranks
from cohort.engine.forward_backward import (
    Accumulation,
    AloneAccumulation,
    Passes,
    Piece,
    Sequences,
    ShardedAccumulation,
    Turn,
    Work,
    no_gradient,
)
from cohort.engine.forward_only import ForwardOnly
from cohort.engine.loss import AnyStepLoss, PerSequence, PerTokenLoss, StepLoss, TrainResult, per_sequence
from cohort.engine.optimizer import Optimizers
from cohort.engine.optimizer_offload import local
from cohort.engine.out_of_memory import is_out_of_memory
from cohort.engine.repack import packed_again
from cohort.engine.router_aux_loss import Balance
from cohort.errors import OutOfStepError, StopRequested, TrainingError
from cohort.models import Policy
from cohort.records import ForwardOnlyOutput, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """One optimizer step."""

    grad_norm: float  # before clipping
    learning_rate: float


@dataclass(slots=True)
class TokenBudget:
    """The most tokens of a micro-batch, `train.micro_batch_tokens`. Models that are trained on one device share it."""

    tokens: int


class TrainEngine:
    """Holds the policy that is trained, its optimizer and, where there is a KL divergence, the reference."""

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
        ranks: Ranks = ALONE,
    ):
        """Make the optimizer.

        Args:
            policy: trained in place.
            config: the `train` section.
            optim: the `optim` section; AdamW by default.
            budget: that the batches are packed under; halved when memory runs out.
            learning_rate: number of updates done -> learning rate of the next.
            temperature: of sampling; the logprobs of the loss are of the same distribution.
            reference: model that a KL divergence is measured from; never trained.
            reference_in_loss: the loss looks at its logprobs; else only `estimate` does.
            reference_changes: it is refreshed from time to time, so that it is part of the state.
            ranks: this process among those of the run. All call the same verbs in the same order.
        """
        self.policy = policy
        self.budget = budget
        self.updates_done = 0
        self._config = config
        self._learning_rate = learning_rate
        self._temperature = temperature
        self.ranks = ranks
        self._batch = TrainBatch(
            micro_batches=(),
            micro_batch_tokens=budget.tokens,
            num_trajectories=0,
            num_loss_tokens=0,
            num_over_budget=0,
        )
        self.old_outputs: dict[int, Tensor] = {}  # sequence index -> [C], of the policy before the batch's first pass
        self._reference_logprobs: dict[int, Tensor] | None = None
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._accumulation: Accumulation = (
            AloneAccumulation(*policy.embeddings_and_head())
            if policy.sharding is None
            else ShardedAccumulation(policy.sharding.collectives, ranks.dp_size)
        )
        forward_only = partial(ForwardOnly, accumulation=self._accumulation, ranks=ranks, temperature=temperature)
        self._policy_forward = forward_only(policy)
        self._reference = reference
        self._reference_changes = reference_changes
        self.reference_in_loss = reference is not None and reference_in_loss
        self._reference_forward = None if reference is None else forward_only(reference)
        self._optimizer = Optimizers(
            policy.model, optim or AdamwConfig(), master_weights=policy.master_weights, seed=config.seed
        )
        coefficient = config.router_aux_loss_coef
        self._balance = Balance(policy, coefficient) if coefficient else None

    def forward_backward(
        self,
        batch: TrainBatch | None,
        per_token_loss: PerTokenLoss,
        *,
        old_logprobs: Mapping[int, Tensor] | None = None,
        may_stop: bool = False,
    ) -> TrainResult:
        """Make the gradient of `sum(loss_weight * per_token_loss)` over the whole step, in place of what was there.

        Where a micro-batch runs out of memory on any rank, all begin again with half of the budget, which stays halved.

        Args:
            batch: this rank's micro-batches; how the step was split over ranks and micro-batches does not change the
                sum. None for another pass over the last one, whose old logprobs are those of its first pass.
            per_token_loss: not reduced.
            old_logprobs: sequence index -> [C], of a policy before the current one. By default the current policy is
                the old one in the first pass over a batch.
            may_stop: nothing has been learned of this step's sequences yet.

        Raises:
            OutOfStepError: a single sequence does not fit into memory.
            StopRequested: the run was asked to end, and may. Every rank raises it.
        """
        if batch is not None:
            self._batch, self.old_outputs = batch, dict(old_logprobs or {})
        if self._batch.micro_batch_tokens > self.budget.tokens:  # halved since
            self._pack_again()
        is_old = batch is not None and old_logprobs is None
        num_out_of_memory = 0
        while True:
            self.policy.model.zero_grad()
            if batch is not None and self.reference_in_loss:
                num_out_of_memory += self._ask_reference(may_stop)
            routed, more_out_of_memory = self._count_choices(may_stop)
            passes = self._new_passes(per_token_loss, is_old=is_old)
            num_micro_batches, failures = self._run(passes, may_stop=may_stop)
            num_out_of_memory += more_out_of_memory + failures
            if num_micro_batches is not None:
                break
            del passes  # and the prompt that it has open
            self._accumulation.start_again()
            self.budget.tokens = int(self.ranks.smallest(self.budget.tokens))
            self._pack_again()
        if is_old:
            self.old_outputs = passes.outputs
        passes.totals.count({"num_out_of_memory": num_out_of_memory})
        metrics, counts = passes.totals.over(self.ranks, num_tokens=self._batch.num_loss_tokens)
        return TrainResult(metrics={**metrics, **routed}, num_micro_batches=num_micro_batches, **counts)

    def _ask_reference(self, may_stop: bool) -> int:
        """The reference's logprobs of the step, for its loss; how often memory ran out."""
        assert self._reference_forward is not None, "a loss that looks at a reference was built without one"
        done = self._reference_forward.compute(
            self._batch.sequences, micro_batch_tokens=self.budget.tokens, may_stop=may_stop
        )
        self._reference_logprobs = dict(done.logprobs)
        return done.num_out_of_memory

    def _new_passes(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> Passes:
        """For the way through a step from its first micro-batch on."""
        self.policy.model.train()
        # dropout, where a model has it, depends on the update and the rank alone
        torch.manual_seed(_seed(self._config.seed, self.updates_done, self.ranks.dp_rank))
        return Passes(self._step_loss(per_token_loss, is_old=is_old), self._accumulation, self._balance)

    def _count_choices(self, may_stop: bool) -> tuple[dict[str, float], int]:
        """What the routers choose over the whole step, which their loss has to know before any of it is computed.

        Returns:
            metrics of it, and how often memory ran out.
        """
        metrics: dict[str, float] = {}
        if self._balance is None:
            return metrics, 0
        self.policy.model.eval()
        sequences = self._batch.sequences
        with self._balance.counting(sequences, self.ranks, metrics):
            done = self._policy_forward.compute(
                sequences,
                micro_batch_tokens=self.budget.tokens,
                may_stop=may_stop,
                around=self._balance.counted,
            )
        return metrics, done.num_out_of_memory

    def _run(self, passes: Passes, *, may_stop: bool) -> tuple[int | None, int]:
        """Compute the batch, in step with the other ranks.

        Args:
            passes: of this way through it.
            may_stop: the rest may be left undone where the run is to end.

        Returns:
            the number of micro-batches, None where memory ran out on any rank; and how often it did on this one.
        """
        work = Work(self._batch)
        num_micro_batches = 0
        while (now := work.agree(self.ranks, may_stop=may_stop)) is not Turn.NOTHING:
            match now:
                case Turn.STOP:  # between two passes, where nothing is gathered and no collective is owed
                    self.policy.model.zero_grad()
                    raise StopRequested("before anything was learned of the step")
                case Turn.START_AGAIN:
                    return None, int(work.ran_out)
                case Turn.OPEN:
                    too_large = passes.open(work.open())
                case Turn.COMPUTE:
                    num_micro_batches += 1
                    too_large = passes.compute(work.next())
                case Turn.CLOSE:
                    work.close()
                    too_large = passes.close()
            if too_large is not None:
                work.ran_out = True
                self.budget.tokens = too_large.half_of(self.budget.tokens)
        return num_micro_batches, 0

    def _pack_again(self) -> None:
        """The batch under the budget as it is now, with what is known of its sequences."""
        self._batch, (self.old_outputs, reference) = packed_again(
            self._batch,
            (self.old_outputs, self._reference_logprobs or {}),
            policy=self.policy,
            ranks=self.ranks,
            micro_batch_tokens=self.budget.tokens,
        )
        self._reference_logprobs = reference if self.reference_in_loss else None

    @property
    def num_state_bytes(self) -> int:
        """What the optimizer keeps of this rank's weights, wherever it is; a checkpoint has it of all ranks."""
        return self._optimizer.state_bytes()

    @property
    def num_device_state_bytes(self) -> int:
        """What of that takes memory of this rank's device."""
        return 0 if self.policy.state_on_host else self.num_state_bytes

    def fits(self, sequences: Sequences, per_token_loss: PerTokenLoss, *, reserved_bytes: int = 0) -> bool:
        """Whether a micro-batch of these sequences fits into the memory of every rank; nothing is learned.

        Every rank calls this. To be asked before the first step, and with sequences of loss weight 0.

        Args:
            sequences: of the micro-batch.
            per_token_loss: of the run.
            reserved_bytes: that something else will take, and has not yet.
        """
        self.policy.model.train()
        states = self.num_device_state_bytes + reserved_bytes
        try:
            room = torch.empty(states, dtype=torch.uint8, device=self.policy.device)  # for the optimizer's state
            for parameter in self._parameters:  # and for the gradients, which all micro-batches but the first find
                parameter.grad = no_gradient(parameter)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfStepError(
                f"out of memory: the model, its gradients and its optimizer do not fit ({states / 1e9:.1f} GB for the "
                f"optimizer's state alone); use more processes"
            ) from None
        if self.reference_in_loss:
            zeros = torch.zeros(sum(s.num_loss_tokens for s in sequences), device=self.policy.device)
            self._reference_logprobs = dict(per_sequence(zeros, sequences))
        passes = Passes(self._step_loss(per_token_loss, is_old=True), self._accumulation, self._balance)
        fits = passes.compute(Piece(sequences=sequences)) is None
        del room
        self.policy.model.zero_grad()
        self.old_outputs, self._reference_logprobs = {}, None
        return self.ranks.smallest(fits) == 1

    def forward_only(
        self, sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyOutput]
    ) -> dict[ForwardOnlyOutput, PerSequence]:
        """Compute outputs of this rank's sequences without gradient, [T] by sequence index. Every rank calls this.

        Args:
            sequences: of this rank; other ranks may have more or fewer.
            wanted: which outputs; the same on every rank.

        Raises:
            OutOfStepError: a single sequence does not fit into memory.
        """
        outputs: dict[ForwardOnlyOutput, PerSequence] = {}
        if wanted & {"logprobs", "entropies"}:
            self.policy.model.eval()
            of_policy = self._policy_forward.compute(
                sequences, micro_batch_tokens=self.budget.tokens, entropy="entropies" in wanted
            )
            outputs |= {"logprobs": of_policy.logprobs, "entropies": of_policy.entropies}
        if "reference_logprobs" in wanted:
            assert self._reference_forward is not None, "an algorithm that asks for a reference was built without one"
            of_reference = self._reference_forward.compute(sequences, micro_batch_tokens=self.budget.tokens)
            outputs["reference_logprobs"] = of_reference.logprobs
        return {name: outputs[name] for name in wanted}

    def optim_step(self) -> OptimResult:
        """Clip the gradient, update the weights, forget the gradient.

        Where nothing has a gradient, or the learning rate is 0, weights and moments stay as they are: neither momentum
        nor weight decay moves what the step has nothing to say about.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before. Every rank raises it.
        """
        learning_rate = self._learning_rate(self.updates_done)
        for parameter in self._parameters:
            if parameter.grad is None:  # of a weight that no token of the step went through
                parameter.grad = no_gradient(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at optimizer step {self.updates_done + 1}; the weights were not "
                f"changed. Lower train.learning_rate (now {learning_rate:.3g}) or look at the completions"
            )
        if learning_rate > 0 and grad_norm > 0:
            self._optimizer.step(learning_rate, update=self.updates_done)
        self.policy.model.zero_grad()
        self.updates_done += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    @torch.no_grad()
    def refresh_reference(self, mix: float) -> None:
        """Move the reference towards the policy: reference = mix * policy + (1 - mix) * reference (arXiv:2404.09656).

        Every rank moves its shards.
        """
        assert self._reference is not None, "only a run with a reference refreshes it"
        of_policy = dict(self.policy.model.named_parameters())
        for name, parameter in self._reference.model.named_parameters():
            local(parameter).lerp_(local(of_policy[name]).to(local(parameter).device), mix)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state and counters, to be resumed from on any number of ranks; a changing reference's weights too.

        The policy's weights are saved as a model folder.
        """
        state = {
            "optimizer": self._optimizer.state_dict(),
            "updates_done": self.updates_done,
        }
        if self._reference is not None and self._reference_changes:
            state["reference"] = get_model_state_dict(self._reference.model)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates_done = state["updates_done"]
        if self._reference is not None and self._reference_changes:
            set_model_state_dict(self._reference.model, state["reference"])

    def _step_loss(self, per_token_loss: PerTokenLoss, *, is_old: bool) -> AnyStepLoss:
        """The loss of this step's sequences; `is_old`: the policy has not been updated since they were sampled."""
        return StepLoss(
            policy=self.policy,
            policy_loss=per_token_loss,
            temperature=self._temperature,
            old_logprobs=None if is_old else self.old_outputs,
            reference_logprobs=self._reference_logprobs,
            gradients_in_forward=self._config.gradients_in_forward,
        )


def _seed(*parts: int) -> int:
    """A seed for the process-wide generator."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
