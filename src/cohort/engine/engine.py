"""Gradients and updates. Few verbs: `forward_backward`, `optim_step`, `state_dict`, `load_state_dict`.

T scored tokens of a micro-batch, C of a completion.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from cohort.batch import LossInputs, LossOutput, MicroBatch, TrainBatch
from cohort.config import TrainConfig
from cohort.distributed import ALONE, Ranks
from cohort.engine.accumulation import Accumulation, AloneAccumulation, Done, ShardedAccumulation, is_out_of_memory
from cohort.engine.totals import Totals
from cohort.errors import OutOfStepError, TrainingError
from cohort.packing import collate, pack
from cohort.policy import Policy
from cohort.records import TrainSequence

PolicyLoss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one pass over a step's batch gives besides the gradients. Counts are of all ranks."""

    metrics: Mapping[str, float]
    num_inputs: int  # tokens that were to be computed
    num_positions: int  # positions that were, padding included
    num_micro_batches: int  # of each rank, empty ones included
    num_out_of_memory: int  # micro-batches that had to be computed again, in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """One optimizer step."""

    grad_norm: float  # before clipping
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A micro-batch to do."""

    sequences: tuple[TrainSequence, ...] = ()
    done: Done = frozenset()  # whose gradient of it has been added already


class TrainEngine:
    """Holds the policy that is trained, its optimizer and, where the loss has a KL term, the frozen reference."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        micro_batch_tokens: int,
        learning_rate: Callable[[int], float],
        temperature: float,
        reference: Policy | None,
        ranks: Ranks = ALONE,
    ):
        """Make the optimizer.

        Args:
            policy: trained in place.
            config: the `train` section.
            micro_batch_tokens: budget that the batches are packed under; halved when memory runs out.
            learning_rate: number of updates done -> learning rate of the next.
            temperature: of sampling; the logprobs of the loss are of the same distribution.
            reference: frozen model for a KL term.
            ranks: this process among those of the run. All call the same verbs in the same order.
        """
        self.policy = policy
        self.micro_batch_tokens = micro_batch_tokens
        self.updates_done = 0
        self._config = config
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._reference = reference
        self.ranks = ranks
        self._batch = TrainBatch(micro_batches=(), num_sequences=0, num_scored_tokens=0, num_over_budget=0)
        self.old_logprobs: dict[int, Tensor] = {}  # sequence index -> [C], of the batch's first pass
        self._parameters = parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._accumulation: Accumulation = (
            AloneAccumulation(parameters)
            if policy.sharding is None
            else ShardedAccumulation(policy.sharding.collectives, ranks.world_size)
        )
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},  # norms and biases do not decay
        ]
        self._optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=policy.device.type in ("cpu", "cuda"),
        )

    def forward_backward(
        self,
        batch: TrainBatch | None,
        policy_loss: PolicyLoss,
        *,
        old_logprobs: Mapping[int, Tensor] | None = None,
    ) -> TrainResult:
        """Add the gradient of `sum(loss_weight * per_token_loss)` over the whole step to the parameters' gradients.

        A micro-batch that runs out of memory is computed again in parts, and the budget is halved from there on.

        Args:
            batch: this rank's micro-batches; how the step was split over ranks and micro-batches does not change the
                sum. None for another pass over the last one, whose old logprobs are those of its first pass.
            policy_loss: per-token loss, not reduced.
            old_logprobs: sequence index -> [C], of a policy before the current one. By default the current policy is
                the old one in the first pass over a batch.

        Raises:
            OutOfStepError: a single sequence does not fit into memory.
        """
        if batch is None:
            old: Mapping[int, Tensor] | None = self.old_logprobs
        else:
            self._batch, old = batch, old_logprobs
        if old is None:
            self.old_logprobs = {}
        self.policy.model.train()
        # dropout, where a model has it, depends on the update and the rank alone
        torch.manual_seed(_seed(self._config.seed, self.updates_done, self.ranks.rank))
        totals = Totals()
        num_micro_batches = num_out_of_memory = 0
        todo = deque(_Piece(sequences=sequences) for sequences in self._batch.micro_batches)
        if batch is None:  # the budget may have been halved since it was packed
            todo = deque(part for piece in todo for part in self._parts(piece))
        while self.ranks.largest(len(todo)) > 0:  # all ranks compute as often as the one with most to do
            num_micro_batches += 1
            piece = todo.popleft() if todo else _Piece()
            done = self._compute(piece, policy_loss, old, totals)
            if done is not None:
                num_out_of_memory += 1
                self._halve_budget(piece)
                left = (_Piece(sequences=piece.sequences, done=done), *todo)
                todo = deque(part for whole in left for part in self._parts(whole))
        self.micro_batch_tokens = int(self.ranks.smallest(self.micro_batch_tokens))
        metrics, counts = totals.over(
            self.ranks, num_tokens=self._batch.num_scored_tokens, num_out_of_memory=num_out_of_memory
        )
        return TrainResult(
            metrics=metrics,
            num_inputs=counts[0],
            num_positions=counts[1],
            num_micro_batches=num_micro_batches,
            num_out_of_memory=counts[2],
        )

    def fits(self, sequences: tuple[TrainSequence, ...], policy_loss: PolicyLoss) -> bool:
        """Whether a micro-batch of these sequences fits into the memory of every rank; nothing is learned.

        Every rank calls this. To be asked before the first step, and with sequences of loss weight 0.
        """
        self.policy.model.train()
        states = sum(2 * p.numel() * p.element_size() for p in map(_local, self._parameters))
        try:
            room = torch.empty(states, dtype=torch.uint8, device=self.policy.device)  # for the optimizer's state
            for parameter in self._parameters:  # and for the gradients, which all micro-batches but the first find
                parameter.grad = torch.zeros_like(parameter)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfStepError(
                f"out of memory: the model, its gradients and its optimizer do not fit ({states / 1e9:.1f} GB for the "
                f"optimizer's state alone); use more processes"
            ) from None
        done = self._compute(_Piece(sequences=sequences), policy_loss, None, Totals())
        del room
        self._optimizer.zero_grad(set_to_none=True)
        self.old_logprobs = {}
        return self.ranks.largest(done is not None) == 0

    def optim_step(self) -> OptimResult:
        """Clip the gradient, update the weights, forget the gradient.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before. Every rank raises it.
        """
        learning_rate = self._learning_rate(self.updates_done)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for parameter in self._parameters:
            if parameter.grad is None:  # nothing had a gradient in this step: AdamW's momentum moves the weights still
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at optimizer step {self.updates_done + 1}; the weights were not "
                f"changed. Lower train.learning_rate (now {learning_rate:.3g}) or look at the completions"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates_done += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state by parameter name, and counters, to be resumed from on any number of ranks.

        The weights are saved as a model folder.
        """
        return {
            "optimizer": get_optimizer_state_dict(self.policy.model, self._optimizer),
            "updates_done": self.updates_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        set_optimizer_state_dict(self.policy.model, self._optimizer, optim_state_dict=state["optimizer"])
        self.updates_done = state["updates_done"]

    def _compute(
        self, piece: _Piece, policy_loss: PolicyLoss, old: Mapping[int, Tensor] | None, totals: Totals
    ) -> Done | None:
        """Add a piece's gradient. None if that went well; where memory ran out, whose gradients have been added."""
        self._accumulation.begin(piece.done)
        try:
            self._micro_batch(piece.sequences, policy_loss, old, totals)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self._accumulation.end()
            return None
        # not in the except block: there the traceback holds what the failed pass has computed
        try:
            return self._accumulation.recover(lambda: self._micro_batch((), policy_loss, old, Totals()))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfStepError(
                "out of memory even without any sequence: the model's largest layer does not fit beside its shards; "
                "use more processes"
            ) from error

    def _micro_batch(
        self,
        sequences: tuple[TrainSequence, ...],
        policy_loss: PolicyLoss,
        old_logprobs: Mapping[int, Tensor] | None,
        totals: Totals,
    ) -> None:
        """Forward and backward of some sequences, or of none: to stay in step with the other ranks."""
        cpu_micro_batch = collate(sequences, share_prompts=self.policy.shares_prompts)
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        micro_batch = cpu_micro_batch.to(self.policy.device, dtype)
        current, entropy = self.policy.logprobs(micro_batch, temperature=self._temperature)
        if old_logprobs is None or not sequences:
            old = current.detach()
        else:
            old = torch.cat([old_logprobs[s.index] for s in sequences])
        out = policy_loss(self._loss_inputs(micro_batch, current, old))
        loss = (micro_batch.loss_weights * out.per_token_loss).sum()
        if loss.requires_grad:
            (loss * self._accumulation.scale).backward()
        if old_logprobs is None:
            self.old_logprobs |= _per_sequence(old, sequences)
        sums = {"loss": loss.detach(), "entropy": entropy.sum()}
        totals.add(
            sums | {name: values.sum() for name, values in out.token_metrics.items()},
            differences=(old - micro_batch.sampling_logprobs).abs(),
            num_inputs=len(micro_batch.input_ids) if sequences else 0,
            num_positions=self.policy.num_positions(cpu_micro_batch) if sequences else 0,
        )

    def _halve_budget(self, piece: _Piece) -> None:
        """Half of the budget, or of what did not fit into memory if that was less.

        Raises:
            OutOfStepError: it was a single sequence.
        """
        tokens = self.policy.num_positions(collate(piece.sequences, share_prompts=self.policy.shares_prompts))
        if len(piece.sequences) <= 1:
            raise OutOfStepError(
                f"out of memory on a single sequence of {tokens} tokens, which cannot be split. Set "
                f"model.gradient_checkpointing: true, or lower rollout.max_completion_tokens, or use more processes"
            )
        self.micro_batch_tokens = max(1, min(self.micro_batch_tokens, tokens) // 2)

    def _parts(self, piece: _Piece) -> list[_Piece]:
        """A piece as micro-batches under the budget as it is now."""
        (batch,) = pack(
            piece.sequences,
            micro_batch_tokens=self.micro_batch_tokens,
            share_prompts=self.policy.shares_prompts,
            padded=self.policy.layout == "padded",
        )
        return [_Piece(sequences=sequences, done=piece.done) for sequences in batch.micro_batches]

    def _loss_inputs(self, micro_batch: MicroBatch, current: Tensor, old: Tensor) -> LossInputs:
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(micro_batch, temperature=self._temperature)
        return LossInputs(
            logprobs=current,
            old_logprobs=old,
            sampling_logprobs=micro_batch.sampling_logprobs,
            reference_logprobs=reference,
            advantages=micro_batch.advantages,
            sequence_ids=micro_batch.sequence_ids,
        )


def _per_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
    """Values of scored tokens [T] by the index of their sequence, [C] each."""
    parts = values.split([s.num_completion_tokens for s in sequences]) if sequences else ()
    return {s.index: part for s, part in zip(sequences, parts, strict=True)}


def _local(parameter: Tensor) -> Tensor:
    """What of a parameter is on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _seed(*parts: int) -> int:
    """A seed for the process-wide generator."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
