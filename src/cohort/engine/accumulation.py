"""Adding up gradients over micro-batches, and what is owed to the other ranks where one of them runs out of memory.

A backward pass that fails halfway has added its gradient to some parameters and not to others. Nobody keeps a record of
which: all ranks drop their gradients and begin again, with smaller micro-batches.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from cohort.engine.out_of_memory import NOTHING, is_out_of_memory, must_fit
from cohort.policy import Collectives


class Accumulation(Protocol):
    """What the engine tells whoever adds up the gradients."""

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

    def __init__(self, collectives: Collectives, dp_size: int):
        self.scale = float(dp_size)
        self._collectives = collectives

    def begin(self) -> None:
        """Count collectives."""
        self._collectives.begin()

    def recover(self, compute_nothing: Callable[[], object]) -> None:
        """Issue the rest of the pass's collectives: the other ranks are in the midst of it and need them."""
        self._collectives.stay_in_step()
        torch.cuda.empty_cache()  # what was gathered is free by now
        compute_nothing()

    def behind(self) -> AbstractContextManager[None]:
        """The other ranks do not take part inside."""
        return self._collectives.left_out()

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
