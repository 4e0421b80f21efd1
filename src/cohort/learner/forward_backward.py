"""Run a step's forward and backward passes, in the same order on all ranks, and accumulate gradients.

Every pass is a sequence of collectives, so all ranks run the same kind of pass at the same time. There are three kinds:
forward and backward of a micro-batch; forward of the shared prefix of a split group, before the group's micro-batches;
and backward of that prefix, after them. A rank without a split group runs an empty prefix, and its own micro-batches
meanwhile.

If a backward pass runs out of memory, some parameters have its gradient and others do not. All ranks then discard their
gradients and retry the step with smaller micro-batches.

C loss tokens of one sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn

from cohort.learner.loss import AnyStepLoss, StepMetrics, per_sequence
from cohort.learner.memory_fallback import (
    EMPTY_OUT_OF_MEMORY,
    OutOfMemory,
    is_out_of_memory,
    micro_batch_out_of_memory,
    must_fit,
    prefix_out_of_memory,
)
from cohort.learner.router_aux_loss import RouterAuxLoss
from cohort.models import Policy, SharedPrefix
from cohort.models.fsdp import Sharding
from cohort.packing import collate, collate_part, collate_prompt
from cohort.packing.batch import MicroBatch, Sequences, TrainBatch
from cohort.packing.to_device import to_device
from cohort.ranks.collectives import Ranks
from cohort.records import IntArray, TrainSequence


class GradientAccumulation:
    """Accumulate gradients over the passes of a step. This base class is for a process without collectives."""

    scale = 1.0  # factor of the loss that undoes the mean over ranks
    keeps_whole_gradients = False  # until the last pass of a step

    def begin(self) -> None:
        """Forget earlier gradients, before the first pass of a step."""

    def set_last(self, is_last: bool) -> None:
        """Say whether the next pass is the last one of the step with a backward, on all ranks."""

    def begin_pass(self) -> None:
        """Prepare for a pass."""

    def recover(self, run_empty: Callable[[], object]) -> None:
        """Free what a failed pass held, and complete its collectives.

        Args:
            run_empty: runs the same pass without sequences.
        """
        torch.cuda.empty_cache()

    def skip_collectives(self) -> AbstractContextManager[None]:
        """Context inside `run_empty`: repeat an earlier pass without the collectives that all ranks have completed."""
        return nullcontext()

    def reset(self) -> None:
        """Discard unfinished passes, on all ranks."""

    def finish(self) -> None:
        """Complete the gradients after the last pass of a step, on all ranks."""


class LocalAccumulation(GradientAccumulation):
    """Accumulate gradients in a single process, with sparse embedding gradients.

    The gradient of an embedding table is 0 except in the rows of a micro-batch's tokens. Only these rows are computed
    and added. Dense gradients of the whole table in every backward pass would dominate the time of small models with
    large vocabularies.
    """

    def __init__(self, tables: Sequence[nn.Embedding], head: Tensor | None):
        """Make the gradients of the embeddings sparse.

        Args:
            tables: embeddings.
            head: weight of the language-model head, whose gradient is dense; a table's own weight if they are tied.
        """
        self._sparse = [table.weight for table in tables if table.weight.requires_grad and table.weight is not head]
        for table in tables:
            # 16-bit rows stay dense, because the dense form adds them up in 32 bits
            table.sparse = table.weight.dtype in (torch.float32, torch.float64)

    def begin_pass(self) -> None:
        """Create the dense gradients that sparse ones are added to."""
        for weight in self._sparse:
            if weight.grad is None:  # otherwise the sparse gradient itself would become the gradient
                weight.grad = zero_gradient(weight)


class ShardedAccumulation(GradientAccumulation):
    """Accumulate gradients with FSDP2, which averages them over the mesh axis `dp_shard` (possibly of size 1)."""

    def __init__(self, sharding: Sharding, dp_shard: int):
        self.scale = float(dp_shard)
        self.keeps_whole_gradients = not sharding.sync_each_micro_batch
        self._sharding, self._collectives = sharding, sharding.collectives

    def begin(self) -> None:
        """Drop gradients of a step that was left."""
        self._sharding.drop_unreduced_gradients()

    def set_last(self, is_last: bool) -> None:
        """Reduce gradients in the last pass only, if whole ones are kept until then."""
        self._sharding.reduce_gradients(is_last)

    def begin_pass(self) -> None:
        """Start counting collectives."""
        self._collectives.begin()

    def recover(self, run_empty: Callable[[], object]) -> None:
        """Issue the rest of the pass's collectives, which the other ranks are waiting for."""
        self._collectives.skip_issued()
        torch.cuda.empty_cache()  # gathered weights are free by now
        run_empty()

    def skip_collectives(self) -> AbstractContextManager[None]:
        """Context in which no collectives are issued."""
        return self._collectives.skip_all()

    def reset(self) -> None:
        """Discard open prefixes and any other state of unfinished passes."""
        self._collectives.reset()

    def finish(self) -> None:
        """Add up the gradients of replicas."""
        self._sharding.all_reduce_gradients()


def zero_gradient(parameter: Tensor) -> Tensor:
    """Return zeros in the dtype in which the parameter's gradients are accumulated."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def try_pass(accumulation: GradientAccumulation, run: Callable[[], object], run_empty: Callable[[], object]) -> bool:
    """Run a pass; return whether it fit into memory. If not, discard its results.

    Args:
        accumulation: gradient accumulation of the step.
        run: the pass.
        run_empty: the same pass without sequences, for the collectives that other ranks are waiting for.

    Raises:
        DoesNotFitError: not even the empty pass fits.
    """
    accumulation.begin_pass()
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    # outside the except block, whose traceback would keep the tensors of the failed pass alive
    with must_fit(str(EMPTY_OUT_OF_MEMORY.indivisible)):
        accumulation.recover(run_empty)
    return False


class Operation(IntEnum):
    """The next operation of all ranks. Each rank proposes one; the largest proposal wins."""

    DONE = 0
    PREFIX_BACKWARD = 1
    MICRO_BATCH = 2  # forward and backward
    PREFIX_FORWARD = 3
    RETRY = 4  # with smaller micro-batches: a rank has run out of memory
    STOP = 5  # the run was asked to stop


class StepSchedule:
    """Schedule of a rank's micro-batches and split groups, with the order of operations agreed among ranks."""

    def __init__(self, batch: TrainBatch):
        self.out_of_memory = False  # on this rank
        self.is_last = False  # whether no rank has a pass after the operation that was agreed on
        self._micro_batches = deque(batch.micro_batches)
        self._split_groups = deque(batch.split_groups)
        self._prefix_open = False  # on all ranks or none
        self._has_prefix = False  # whether the open prefix of this rank is not empty
        self._parts: deque[Sequences] = deque()  # parts of the open split group that are still to run

    def next_operation(self, ranks: Ranks, *, may_stop: bool = False) -> Operation:
        """Agree with the other ranks on the next operation.

        Args:
            ranks: all ranks call this.
            may_stop: whether the step can be abandoned without losing anything; the same on every rank.
        """
        if may_stop and ranks.stop.number:
            proposal = Operation.STOP
        elif self.out_of_memory:
            proposal = Operation.RETRY
        elif self._prefix_open:
            proposal = Operation.MICRO_BATCH if self._parts else Operation.PREFIX_BACKWARD
        elif self._split_groups:
            proposal = Operation.PREFIX_FORWARD
        else:
            proposal = Operation.MICRO_BATCH if self._micro_batches else Operation.DONE
        after_micro_batch = self._prefix_open or len(self._micro_batches) > 1 or bool(self._split_groups)
        after_prefix = bool(self._micro_batches or self._split_groups)
        agreed, *passes_left = ranks.all_reduce_maxima([proposal, after_micro_batch, after_prefix])
        self.is_last = not passes_left[agreed == Operation.PREFIX_BACKWARD]
        return Operation(int(agreed))

    def open_prefix(self) -> tuple[Sequences, ...]:
        """Return the parts of the split group whose prefix is next; none if this rank has no split group left."""
        parts = self._split_groups.popleft() if self._split_groups else ()
        self._prefix_open, self._has_prefix = True, bool(parts)
        self._parts = deque(parts)
        return parts

    def close_prefix(self) -> None:
        """Mark the open prefix as finished."""
        self._prefix_open = self._has_prefix = False

    def next_micro_batch(self) -> tuple[Sequences, bool]:
        """Return the sequences of this rank's next micro-batch, and whether they continue the open prefix.

        There are none if this rank only takes part in collectives.
        """
        if self._parts:
            return self._parts.popleft(), True
        if self._has_prefix or not self._micro_batches:  # the open prefix leaves no room for other micro-batches
            return (), False
        return self._micro_batches.popleft(), False


class ForwardBackward:
    """Run the operations of a step: add gradients to the parameters, and collect outputs and metrics.

    Each operation returns what did not fit into memory, or None. After a failure the whole step must be retried.
    """

    def __init__(
        self, loss: AnyStepLoss, accumulation: GradientAccumulation, router_aux_loss: RouterAuxLoss | None = None
    ):
        """Start one pass through a step.

        Args:
            loss: loss of the step's micro-batches.
            accumulation: gradient accumulation of the step.
            router_aux_loss: load-balancing loss of the routers, if any.
        """
        self.metrics = StepMetrics()
        self.outputs: dict[int, Tensor] = {}  # sequence index -> [C], of the old model
        self.entropies: dict[int, Tensor] = {}  # sequence index -> [C], of the current policy
        self._loss = loss
        self._policy = loss.policy
        self._accumulation = accumulation
        self._router_aux_loss = router_aux_loss
        self._prefix: SharedPrefix | None = None
        self._prefix_tokens = 0  # of the open prefix; 0 if it is empty
        self._prefix_loss: Tensor | None = None  # router loss of the open prefix

    def micro_batch(self, sequences: Sequences, *, continues_prefix: bool = False) -> OutOfMemory | None:
        """Run forward and backward of a micro-batch; an empty one only takes part in collectives."""
        prefix = self._prefix if continues_prefix else None
        fits = self._try(lambda: self._micro_batch(sequences, prefix), lambda empty: empty._micro_batch((), None))
        return None if fits else micro_batch_out_of_memory(num_positions(sequences, self._policy), sequences)

    def prefix_forward(self, parts: tuple[Sequences, ...]) -> OutOfMemory | None:
        """Run the forward pass of the prefix of a split group; of an empty prefix without parts."""
        fits = self._try(lambda: self._prefix_forward(parts), lambda empty: empty._prefix_forward(()))
        return None if fits else prefix_out_of_memory(self._prefix_tokens)

    def prefix_backward(self) -> OutOfMemory | None:
        """Run the backward pass of the open prefix."""

        def forward_and_backward(empty: ForwardBackward) -> None:
            with self._accumulation.skip_collectives():
                empty._prefix_forward(())
            empty._prefix_backward()

        fits = self._try(self._prefix_backward, forward_and_backward)
        return None if fits else prefix_out_of_memory(self._prefix_tokens)

    def _try(self, run: Callable[[], None], run_empty: Callable[["ForwardBackward"], None]) -> bool:
        """Run a pass; if it fails, run an empty one on a throwaway instance."""
        empty = ForwardBackward(self._loss, self._accumulation, self._router_aux_loss)
        return try_pass(self._accumulation, run, lambda: run_empty(empty))

    def _prefix_forward(self, parts: tuple[Sequences, ...]) -> None:
        token_ids: IntArray = np.zeros(0, dtype=np.int64)
        if parts:
            token_ids = parts[0][0].token_ids[: parts[0][0].shared_prefix_tokens]
        num_tokens = self._prefix_tokens = len(token_ids)
        self.metrics.count(
            {
                "num_computed_tokens": num_tokens,
                "num_positions": num_tokens,
                "num_prompt_inputs": num_tokens,
                "attention_pairs": num_tokens * (num_tokens + 1) // 2,
            }
        )
        prompt = collate_prompt(token_ids, num_completions=sum(map(len, parts)))
        micro_batch = on_device(prompt, self._policy)
        with self._collect_router_loss(micro_batch) as losses:
            self._prefix = self._policy.forward_prefix(micro_batch)
        self._prefix_loss = losses[0] * self._accumulation.scale if losses else None

    def _prefix_backward(self) -> None:
        assert self._prefix is not None, "forward and backward of a prefix come in pairs"
        self._prefix.backward(self._prefix_loss)
        self._prefix = self._prefix_loss = None

    def _micro_batch(self, sequences: Sequences, shared: SharedPrefix | None) -> None:
        prefix = None if shared is None else shared.detach()
        share_prompts = self._policy.shares_prompts
        on_host = collate(sequences, share_prompts=share_prompts) if prefix is None else collate_part(sequences)
        micro_batch = on_device(on_host, self._policy)
        with self._collect_router_loss(micro_batch) as router_losses:
            out = self._loss(micro_batch, sequences, prefix)
        loss = sum(router_losses, start=out.loss)
        if loss.requires_grad:
            (loss * self._accumulation.scale).backward()
        self.outputs |= per_sequence(out.outputs, sequences)
        if out.entropies is not None:
            self.entropies |= per_sequence(out.entropies, sequences)
        self.metrics.add(out.sums, maxima=out.maxima)
        if sequences:
            self.metrics.count(_counts(on_host, sequences, self._policy))
        if shared is not None and prefix is not None:
            shared.add(prefix)

    def _collect_router_loss(self, micro_batch: MicroBatch) -> AbstractContextManager[list[Tensor]]:
        """Collect the routers' auxiliary loss of the forward pass inside; an empty list if there is none."""
        return nullcontext([]) if self._router_aux_loss is None else self._router_aux_loss.collect(micro_batch)


def num_positions(sequences: Sequences, policy: Policy) -> int:
    """Positions of a micro-batch, as counted by the token budget."""
    return policy.num_positions(collate(sequences, share_prompts=policy.shares_prompts)) if sequences else 0


def on_device(micro_batch: MicroBatch, policy: Policy) -> MicroBatch:
    """Copy a micro-batch to the policy's device, with floating-point tensors in float32 or wider."""
    return to_device(micro_batch, policy.device, torch.promote_types(policy.dtype, torch.float32))


def _counts(micro_batch: MicroBatch, sequences: Sequence[TrainSequence], policy: Policy) -> dict[str, int]:
    """Token counts of a micro-batch on the host."""
    num_computed_tokens = len(micro_batch.input_ids)
    num_prompt_inputs = num_computed_tokens - sum(len(s.token_ids) - 1 - s.shared_prefix_tokens for s in sequences)
    return {
        "num_computed_tokens": num_computed_tokens,
        "num_positions": policy.num_positions(micro_batch),
        "num_tokens_unshared": sum(len(s.token_ids) - 1 for s in sequences),
        "num_prompt_inputs": num_prompt_inputs,  # 0 in a part of a split group
        # a token attends to itself and to all earlier tokens of its sequence, wherever they are in the row
        "attention_pairs": num_computed_tokens + int(micro_batch.position_ids.sum()),
    }
