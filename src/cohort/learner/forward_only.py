"""Forward-only passes: logprobs and entropies of the policy or the reference, without gradients.

T loss tokens of a micro-batch, C of one sequence.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.errors import StopRequested
from cohort.learner.forward_backward import GradientAccumulation, num_positions, on_device, try_pass
from cohort.learner.loss import PerSequence, per_sequence
from cohort.learner.memory_fallback import TokenBudget, micro_batch_out_of_memory, must_fit
from cohort.models import Policy
from cohort.packing import collate, pack
from cohort.packing.batch import MicroBatch, Sequences
from cohort.ranks.collectives import Ranks
from cohort.records import TrainSequence

# Times the token budget of training: a forward-only pass keeps the activations of one layer instead of all layers.
_BUDGET_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Results for this rank's sequences: sequence index -> [C]."""

    logprobs: PerSequence
    entropies: PerSequence  # in nats; empty if not requested
    num_out_of_memory: int  # micro-batches that did not fit and were split


class ForwardOnly:
    """Compute logprobs of sequences, in larger micro-batches than those of training."""

    def __init__(
        self,
        policy: Policy,
        accumulation: GradientAccumulation,
        *,
        budget: TokenBudget,
        ranks: Ranks,
        temperature: float,
    ):
        """Wrap a model.

        Args:
            policy: policy or reference.
            accumulation: used only to recover from out-of-memory.
            budget: token budget of training.
            ranks: all ranks call the same methods at the same time.
            temperature: divides the logits.
        """
        self.policy = policy
        self._accumulation = accumulation
        self._training_budget = budget
        self._ranks = ranks
        self._temperature = temperature
        self._factor = _BUDGET_FACTOR  # lower after out-of-memory

    def compute(
        self,
        sequences: Sequence[TrainSequence],
        *,
        entropy: bool = False,
        may_stop: bool = True,
        context: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> ForwardResult:
        """Compute the logprobs of this rank's sequences. Every rank calls this.

        Args:
            sequences: sequences of this rank; ranks may have different numbers of them.
            entropy: also compute entropies.
            may_stop: whether the step can be abandoned without losing anything.
            context: context manager for each forward pass. A pass that runs out of memory raises in it, and is retried.

        Raises:
            DoesNotFitError: a single sequence does not fit into memory.
            StopRequested: the run was asked to stop, and `may_stop`. Every rank raises it.
        """
        logprobs: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}

        def forward(some: Sequences) -> None:
            micro_batch = on_device(collate(some, share_prompts=self.policy.shares_prompts), self.policy)
            with torch.no_grad(), context(micro_batch):
                values, entropy_T = self.policy.logprobs(micro_batch, temperature=self._temperature, entropy=entropy)
            logprobs.update(per_sequence(values, some))
            if entropy_T is not None:
                entropies.update(per_sequence(entropy_T, some))

        with ExitStack() as stack:
            with must_fit("while copying the reference to the GPU; use reference.device: auto with more processes"):
                stack.enter_context(self.policy.on_device())
            num_out_of_memory = self._run(forward, self._pack(sequences), may_stop)
        return ForwardResult(logprobs=logprobs, entropies=entropies, num_out_of_memory=num_out_of_memory)

    def _run(self, forward: Callable[[Sequences], None], pending: deque[Sequences], may_stop: bool) -> int:
        """Run the pending micro-batches, together with the other ranks; return the number of out-of-memory errors."""
        num_out_of_memory = 0
        ranks = self._ranks
        while (most := ranks.all_reduce_max(math.inf if ranks.stop.number and may_stop else len(pending))) > 0:
            if most == math.inf:
                raise StopRequested("before the step changed anything")
            sequences = pending.popleft() if pending else ()
            if not try_pass(self._accumulation, partial(forward, sequences), partial(forward, ())):
                num_out_of_memory += 1
                failure = micro_batch_out_of_memory(num_positions(sequences, self.policy), sequences)
                self._factor = failure.halve(self._max_tokens) / self._training_budget.tokens
                pending = self._pack([s for micro_batch in (sequences, *pending) for s in micro_batch])
        return num_out_of_memory

    def _pack(self, sequences: Sequence[TrainSequence]) -> deque[Sequences]:
        (batch,) = pack(
            sequences,
            micro_batch_tokens=self._max_tokens,
            share_prompts=self.policy.shares_prompts,
            padded=self.policy.layout == "padded",
            sequence_level=False,  # there is no loss
        )
        return deque(batch.all_micro_batches)

    @property
    def _max_tokens(self) -> int:
        return max(1, round(self._factor * self._training_budget.tokens))
