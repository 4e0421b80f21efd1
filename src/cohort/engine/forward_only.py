"""Logprobs without a gradient: the reference's, and the policy's where they are asked for besides training."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort import stopping
from cohort.batch import MicroBatch, TrainBatch
from cohort.distributed import Ranks
from cohort.engine.forward_backward import Accumulation, Sequences, attempt, num_positions, on_device
from cohort.engine.loss import PerSequence, per_sequence
from cohort.engine.out_of_memory import must_fit, too_large
from cohort.errors import StopRequested
from cohort.models import Policy
from cohort.packing import collate, pack
from cohort.records import TrainSequence

# Times the budget of training: a forward pass without a backward keeps one layer's activations, and not all layers'.
_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Of this rank's sequences, by the index of each, [C] of its loss tokens."""

    logprobs: PerSequence
    entropies: PerSequence  # in nats; empty where they were not asked for
    num_out_of_memory: int  # micro-batches that did not fit, and were computed in parts


class ForwardOnly:
    """Computes the logprobs of sequences, in larger micro-batches than those of training."""

    def __init__(self, policy: Policy, accumulation: Accumulation, *, ranks: Ranks, temperature: float):
        """Of a model.

        Args:
            policy: the model.
            accumulation: whose way of staying in step after running out of memory is used; nothing is added up.
            ranks: all call the same methods at the same time.
            temperature: divides the logits.
        """
        self.policy = policy
        self._accumulation = accumulation
        self._ranks = ranks
        self._temperature = temperature
        self._factor = _FACTOR  # less where that has run out of memory

    def compute(
        self,
        sequences: Sequence[TrainSequence],
        *,
        micro_batch_tokens: int,
        entropy: bool = False,
        may_stop: bool = True,
        around: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> ForwardResult:
        """The logprobs of this rank's sequences.

        Args:
            sequences: of this rank; other ranks may have more or fewer.
            micro_batch_tokens: the budget of training.
            entropy: compute that too.
            may_stop: nothing has been learned of this step's sequences yet.
            around: what each forward pass is made in; one that runs out of memory raises in it, and is made again.

        Raises:
            OutOfStepError: a single sequence does not fit into memory.
            StopRequested: the run was asked to end, and may. Every rank raises it.
        """
        logprobs: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}

        def compute(some: Sequences) -> None:
            micro_batch = on_device(collate(some, share_prompts=self.policy.shares_prompts), self.policy)
            with torch.no_grad(), around(micro_batch):
                values, entropy_T = self.policy.logprobs(micro_batch, temperature=self._temperature, entropy=entropy)
            logprobs.update(per_sequence(values, some))
            if entropy_T is not None:
                entropies.update(per_sequence(entropy_T, some))

        def packed(some: Sequence[TrainSequence]) -> deque[Sequences]:
            return deque(pack_alone(some, self.policy, self._budget(micro_batch_tokens)).all_micro_batches)

        with ExitStack() as visit:
            with must_fit("while the reference is copied to the GPU; use reference.device: auto with more processes"):
                visit.enter_context(self.policy.on_device())
            num_out_of_memory = self._run(compute, packed, packed(sequences), micro_batch_tokens, may_stop)
        return ForwardResult(logprobs=logprobs, entropies=entropies, num_out_of_memory=num_out_of_memory)

    def _run(
        self,
        compute: Callable[[Sequences], None],
        packed: Callable[[Sequence[TrainSequence]], deque[Sequences]],
        todo: deque[Sequences],
        micro_batch_tokens: int,
        may_stop: bool,
    ) -> int:
        """Compute what there is to do, in step with the other ranks; how often memory ran out."""
        num_out_of_memory = 0
        while (most := self._ranks.largest(math.inf if stopping.requested() and may_stop else len(todo))) > 0:
            if most == math.inf:
                raise StopRequested("before anything was learned of the step")
            now = todo.popleft() if todo else ()
            if not attempt(self._accumulation, partial(compute, now), partial(compute, ())):
                num_out_of_memory += 1
                failed = too_large(num_positions(now, self.policy), now)
                budget = failed.half_of(self._budget(micro_batch_tokens))
                self._factor = budget / micro_batch_tokens
                todo = packed([s for piece in (now, *todo) for s in piece])
        return num_out_of_memory

    def _budget(self, micro_batch_tokens: int) -> int:
        return max(1, round(self._factor * micro_batch_tokens))


def pack_alone(sequences: Sequence[TrainSequence], policy: Policy, micro_batch_tokens: int) -> TrainBatch:
    """Sequences as a batch for one rank."""
    (batch,) = pack(
        sequences,
        micro_batch_tokens=micro_batch_tokens,
        share_prompts=policy.shares_prompts,
        padded=policy.layout == "padded",
        sequence_level=False,  # nothing is summed
    )
    return batch
