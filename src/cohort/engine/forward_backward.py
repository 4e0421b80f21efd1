"""The passes of a step: what is left to compute, forward and backward of each, and gradients added up over all of them.

Every rank runs the same passes at the same time, as each of them is a sequence of collectives. A pass is a micro-batch,
or the prompt of a stream: forward when it is opened, backward when all parts of the streams that are open have been
computed. A rank without a stream opens nothing in particular then, and goes on with its micro-batches meanwhile.

A backward pass that runs out of memory halfway has added its gradient to some parameters and not to others. Nobody
keeps a record of which: all ranks drop their gradients and begin again, with smaller micro-batches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cohort import stopping
from cohort.batch import MicroBatch, TrainBatch
from cohort.distributed import Ranks
from cohort.engine.loss import AnyStepLoss, Totals, per_sequence
from cohort.engine.out_of_memory import NOTHING, TooLarge, is_out_of_memory, must_fit, too_large, too_large_prompt
from cohort.engine.router_aux_loss import Balance
from cohort.host_to_device import to_device
from cohort.models import CollectiveCounter, Policy, SharedPrefix
from cohort.packing import collate, collate_part, collate_prompt
from cohort.records import IntArray, TrainSequence


class Accumulation(Protocol):
    """Gradient accumulation over the passes of a step."""

    scale: float  # factor of the loss that undoes what the addition over ranks divides by

    def begin(self) -> None:
        """A pass begins: a micro-batch, or one way through the prompt of a stream."""
        ...

    def recover(self, compute_nothing: Callable[[], object]) -> None:
        """After a pass failed: free what it held, and stay in step with the other ranks.

        Args:
            compute_nothing: the same pass without any sequences.
        """
        ...

    def behind(self) -> AbstractContextManager[None]:
        """Inside, in `compute_nothing`, is what came before the pass that failed, and all ranks have behind them."""
        ...

    def start_again(self) -> None:
        """All ranks drop what they have begun."""
        ...


class AloneAccumulation:
    """One process: autograd adds to each parameter's gradient, once per backward pass.

    The gradient of an embedding table is 0 but for the rows of the tokens in a micro-batch. Only these are made and
    added: as many numbers as in the whole table, once more in every backward pass, are more than all else in small
    models with large vocabularies.
    """

    scale = 1.0

    def __init__(self, tables: Sequence[nn.Embedding], head: Tensor | None):
        """Take over the gradients of a model.

        Args:
            tables: of embeddings, whose gradient may be sparse.
            head: weight of the language-model head, whose gradient is dense; one of the tables' where they are tied.
        """
        self._added_to = [table.weight for table in tables if table.weight.requires_grad and table.weight is not head]
        for table in tables:
            # sums of rows in 16 bits are left to the dense form, which adds them up in 32
            table.sparse = table.weight.dtype in (torch.float32, torch.float64)

    def begin(self) -> None:
        """Make the gradients that sparse ones are added to."""
        for weight in self._added_to:
            if weight.grad is None:  # what is sparse is added to what is dense; else it would be the gradient itself
                weight.grad = no_gradient(weight)

    def recover(self, compute_nothing: Callable[[], object]) -> None:
        """Nobody waits for this process: nothing needs to be computed."""
        torch.cuda.empty_cache()

    def behind(self) -> AbstractContextManager[None]:
        """Nothing is owed to anyone."""
        return nullcontext()

    def start_again(self) -> None:
        """Nothing is kept between passes."""


class ShardedAccumulation:
    """FSDP2 reduces each group's gradient over the mesh axis `dp`, which may have one rank, and takes the mean."""

    def __init__(self, collectives: CollectiveCounter, dp_size: int):
        self.scale = float(dp_size)
        self._collectives = collectives

    def begin(self) -> None:
        """Count collectives."""
        self._collectives.begin()

    def recover(self, compute_nothing: Callable[[], object]) -> None:
        """Issue the rest of the pass's collectives: the other ranks are in the midst of it and need them."""
        self._collectives.skip_issued()
        torch.cuda.empty_cache()  # what was gathered is free by now
        compute_nothing()

    def behind(self) -> AbstractContextManager[None]:
        """The other ranks do not take part inside."""
        return self._collectives.skip_all()

    def start_again(self) -> None:
        """Forget the prompts that are open, and whatever else a pass has left."""
        self._collectives.reset()


def no_gradient(parameter: Tensor) -> Tensor:
    """Zeros, in the dtype that the parameter's gradients are added up in."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def attempt(accumulation: Accumulation, compute: Callable[[], object], compute_nothing: Callable[[], object]) -> bool:
    """Run a pass, in step with the other ranks. Whether it fitted into memory; else nothing of it is of use.

    Args:
        accumulation: of the gradients.
        compute: the pass.
        compute_nothing: the same pass without sequences, which the other ranks need where they are in the midst of it.

    Raises:
        OutOfStepError: there is not even memory for nothing.
    """
    accumulation.begin()
    try:
        compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    # not in the except block: there the traceback holds what the failed pass has computed
    with must_fit(str(NOTHING.whole)):
        accumulation.recover(compute_nothing)
    return False


Sequences = tuple[TrainSequence, ...]


class Turn(IntEnum):
    """What all ranks do at the same time. The largest of their wishes is done."""

    NOTHING = 0
    CLOSE = 1  # backward of the open prompts
    COMPUTE = 2  # a micro-batch, or a part of a stream
    OPEN = 3  # forward of prompts
    START_AGAIN = 4  # with smaller micro-batches: a rank has run out of memory
    STOP = 5  # the run was asked to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences to compute together; empty if this rank only keeps step with the others."""

    sequences: Sequences = ()
    in_stream: bool = False  # goes on from the open prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A group whose prompt is computed once and whose completions are computed in parts."""

    prompt: IntArray  # [P] token ids
    parts: tuple[Sequences, ...]

    @classmethod
    def of(cls, parts: tuple[Sequences, ...]) -> "Stream":
        """Of the parts, which all begin with the prompt."""
        first = parts[0][0]
        return cls(prompt=first.token_ids[: first.shared_prefix_tokens], parts=parts)


class Work:
    """The streams and micro-batches of a rank that are not computed yet."""

    def __init__(self, batch: TrainBatch):
        self.ran_out = False  # of memory, on this rank
        self._micro_batches = deque(batch.micro_batches)
        self._streams = deque(map(Stream.of, batch.split_groups))
        self._is_open = False  # on all ranks or none
        self._has_stream = False  # this rank, of those that are open
        self._parts: deque[Sequences] = deque()  # of it

    def agree(self, ranks: Ranks, *, may_stop: bool = False) -> Turn:
        """What all ranks do next.

        Args:
            ranks: all that do it.
            may_stop: nothing is lost by leaving the rest undone; the same on every rank.
        """
        if may_stop and stopping.requested():
            wish = Turn.STOP
        elif self.ran_out:
            wish = Turn.START_AGAIN
        elif self._is_open:
            wish = Turn.COMPUTE if self._parts else Turn.CLOSE
        elif self._streams:
            wish = Turn.OPEN
        else:
            wish = Turn.COMPUTE if self._micro_batches else Turn.NOTHING
        return Turn(int(ranks.largest(wish)))

    def open(self) -> Stream | None:
        """The stream whose prompt is to be opened; None where this rank has no more."""
        stream = self._streams.popleft() if self._streams else None
        self._is_open, self._has_stream = True, stream is not None
        self._parts = deque(stream.parts if stream else ())
        return stream

    def close(self) -> None:
        """All parts are through."""
        self._is_open = self._has_stream = False

    def next(self) -> Piece:
        """What this rank computes now."""
        if self._parts:
            return Piece(sequences=self._parts.popleft(), in_stream=True)
        if self._has_stream or not self._micro_batches:  # beside an open prompt is no room for more
            return Piece()
        return Piece(sequences=self._micro_batches.popleft())


class Passes:
    """Adds the gradient of pieces and streams to the parameters', and keeps what comes out of them."""

    def __init__(self, loss: AnyStepLoss, accumulation: Accumulation, balance: Balance | None = None):
        """Of one way through a step's sequences.

        Args:
            loss: of their tokens.
            accumulation: of the gradients.
            balance: the loss of the routers, where there is one.
        """
        self.totals = Totals()
        self.outputs: dict[int, torch.Tensor] = {}  # sequence index -> [C], of the old model
        self._loss = loss
        self._policy = loss.policy
        self._accumulation = accumulation
        self._balance = balance
        self._prompt: SharedPrefix | None = None
        self._prompt_tokens = 0  # of the open prompt; 0 where that is nothing in particular
        self._prompt_loss: torch.Tensor | None = None  # of the routers, in the open prompt

    def compute(self, piece: Piece) -> TooLarge | None:
        """Add a piece's gradient.

        Args:
            piece: to compute; an empty one keeps step with the other ranks.

        Returns:
            what did not fit into memory; then this way through the step leads nowhere.
        """
        fits = self._attempt(
            lambda: self._micro_batch(piece.sequences, self._prompt if piece.in_stream else None),
            lambda nothing: nothing._micro_batch((), None),
        )
        return None if fits else too_large(num_positions(piece.sequences, self._policy), piece.sequences)

    def open(self, stream: Stream | None) -> TooLarge | None:
        """Forward of a stream's prompt, see `compute`; of nothing in particular where this rank has no stream."""
        fits = self._attempt(lambda: self._open(stream), lambda nothing: nothing._open(None))
        return None if fits else too_large_prompt(self._prompt_tokens)

    def close(self) -> TooLarge | None:
        """Backward of the open prompt, see `compute`."""

        def open_and_close(nothing: Passes) -> None:
            with self._accumulation.behind():
                nothing._open(None)
            nothing._close()

        return None if self._attempt(self._close, open_and_close) else too_large_prompt(self._prompt_tokens)

    def _attempt(self, compute: Callable[[], None], compute_nothing: Callable[["Passes"], None]) -> bool:
        """A pass; where it fails, the same without sequences, of which nothing is kept."""
        nothing = Passes(self._loss, self._accumulation, self._balance)
        return attempt(self._accumulation, compute, lambda: compute_nothing(nothing))

    def _open(self, stream: Stream | None) -> None:
        prompt = stream.prompt if stream else np.zeros(0, dtype=np.int64)
        num_tokens = self._prompt_tokens = len(prompt)
        self.totals.count(
            {
                "num_inputs": num_tokens,
                "num_positions": num_tokens,
                "num_prompt_inputs": num_tokens,
                "attention_pairs": num_tokens * (num_tokens + 1) // 2,
            }
        )
        num_completions = sum(map(len, stream.parts)) if stream else 0
        micro_batch = on_device(collate_prompt(prompt, num_completions=num_completions), self._policy)
        with self._routed(micro_batch) as losses:
            self._prompt = self._policy.forward_prefix(micro_batch)
        self._prompt_loss = losses[0] * self._accumulation.scale if losses else None

    def _close(self) -> None:
        assert self._prompt is not None, "ranks open and close together"
        self._prompt.backward(self._prompt_loss)
        self._prompt = self._prompt_loss = None

    def _micro_batch(self, sequences: Sequences, prompt: SharedPrefix | None) -> None:
        """Forward and backward of some sequences, or of none: to stay in step with the other ranks."""
        prefix = None if prompt is None else prompt.detach()
        share = self._policy.shares_prompts
        on_host = collate(sequences, share_prompts=share) if prefix is None else collate_part(sequences)
        micro_batch = on_device(on_host, self._policy)
        with self._routed(micro_batch) as losses:
            out = self._loss(micro_batch, sequences, prefix)
        loss = sum(losses, start=out.loss)
        if loss.requires_grad:
            (loss * self._accumulation.scale).backward()
        self.outputs |= per_sequence(out.outputs, sequences)
        self.totals.add(out.sums, largest=out.largest)
        if sequences:
            self.totals.count(_counts(on_host, sequences, self._policy))
        if prompt is not None and prefix is not None:
            prompt.add(prefix)

    def _routed(self, micro_batch: MicroBatch) -> AbstractContextManager[list[torch.Tensor]]:
        """The loss of the routers of what is computed inside, once that is done; nothing where there is none."""
        return nullcontext([]) if self._balance is None else self._balance.of(micro_batch)


def num_positions(sequences: Sequences, policy: Policy) -> int:
    """Of a micro-batch, as its budget counts them."""
    return policy.num_positions(collate(sequences, share_prompts=policy.shares_prompts)) if sequences else 0


def on_device(micro_batch: MicroBatch, policy: Policy) -> MicroBatch:
    """A micro-batch where the policy computes, its real numbers in float32 or wider."""
    return to_device(micro_batch, policy.device, torch.promote_types(policy.dtype, torch.float32))


def _counts(micro_batch: MicroBatch, sequences: Sequence[TrainSequence], policy: Policy) -> dict[str, int]:
    """What a micro-batch on the host comes to."""
    num_inputs = len(micro_batch.input_ids)
    num_prompt_inputs = num_inputs - sum(len(s.token_ids) - 1 - s.shared_prefix_tokens for s in sequences)
    return {
        "num_inputs": num_inputs,
        "num_positions": policy.num_positions(micro_batch),
        "num_unshared_inputs": sum(len(s.token_ids) - 1 for s in sequences),
        "num_prompt_inputs": num_prompt_inputs,  # of a part of a stream: none
        # a token sees all of its sequence up to itself, wherever that is in the row
        "attention_pairs": num_inputs + int(micro_batch.position_ids.sum()),
    }
