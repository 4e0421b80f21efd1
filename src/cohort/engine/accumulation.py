"""Adding up gradients over micro-batches so that a micro-batch that ran out of memory can be computed again, in parts.

A backward pass that fails halfway has added its gradient to some parameters and not to others. What was added stays;
the second computation leaves those parameters out. So nothing is added twice and no copy of the gradients is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from cohort.errors import OutOfStepError
from cohort.policy import Collectives

# Parameters, or FSDP groups of them, by number.
Done = frozenset[int]


class Accumulation(Protocol):
    """What the engine tells whoever adds up the gradients."""

    scale: float  # factor of the loss that undoes what the addition over ranks divides by

    def begin(self, done: Done) -> None:
        """A micro-batch begins; the gradients of the parameters in `done` have been added already."""
        ...

    def end(self) -> None:
        """The micro-batch is through."""
        ...

    def recover(self, compute_nothing: Callable[[], object]) -> Done:
        """After a micro-batch failed: free what it held.

        Args:
            compute_nothing: forward and backward without any sequences.

        Returns:
            Whose gradients have been added by now.
        """
        ...


class AloneAccumulation:
    """One process: autograd adds to each parameter's gradient, once per backward pass.

    The gradient of an embedding table is 0 but for the rows of the tokens in a micro-batch. Only these are made and
    added: as many numbers as in the whole table, once more in every backward pass, are more than all else in small
    models with large vocabularies.
    """

    scale = 1.0

    def __init__(self, parameters: Sequence[nn.Parameter], tables: Sequence[nn.Embedding], head: Tensor | None):
        """Take over the gradients of a model.

        Args:
            parameters: that are trained.
            tables: of embeddings, whose gradient may be sparse.
            head: weight of the language-model head, whose gradient is dense; one of the tables' where they are tied.
        """
        self._parameters = parameters
        self._added_to = [table.weight for table in tables if table.weight.requires_grad and table.weight is not head]
        for table in tables:
            # sums of rows in 16 bits are left to the dense form, which adds them up in 32
            table.sparse = table.weight.dtype in (torch.float32, torch.float64)
        self._added: set[int] = set()
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._added.add(number))

    def begin(self, done: Done) -> None:
        """Leave the parameters in `done` out."""
        self._added = set(done)
        for weight in self._added_to:
            if weight.grad is None:  # what is sparse is added to what is dense; else it would be the gradient itself
                weight.grad = no_gradient(weight)
        for number in done:
            self._parameters[number].requires_grad_(False)

    def end(self) -> None:
        """No parameter is left out any more."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)

    def recover(self, compute_nothing: Callable[[], object]) -> Done:
        """Nobody waits for this process: nothing needs to be computed."""
        self.end()
        torch.cuda.empty_cache()
        return frozenset(self._added)


class ShardedAccumulation:
    """Several processes: FSDP2 reduces each group's gradient over all ranks, and takes the mean of them."""

    def __init__(self, collectives: Collectives, world_size: int):
        self.scale = float(world_size)
        self._collectives = collectives

    def begin(self, done: Done) -> None:
        """Count collectives; what is reduced of the groups in `done` is 0."""
        self._collectives.begin(reduced=done)

    def end(self) -> None:
        """Nothing to undo."""

    def recover(self, compute_nothing: Callable[[], object]) -> Done:
        """Issue the rest of the micro-batch's collectives: the other ranks are in the midst of it and need them."""
        reduced = self._collectives.reset()
        torch.cuda.empty_cache()  # what was gathered is free by now
        compute_nothing()
        return reduced


def no_gradient(parameter: Tensor) -> Tensor:
    """Zeros, in the dtype that the parameter's gradients are added up in."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def attempt(
    accumulation: Accumulation, done: Done, compute: Callable[[], object], compute_nothing: Callable[[], object]
) -> Done | None:
    """Run a pass. None if that went well; where memory ran out, whose gradients have been added by then.

    Args:
        accumulation: of the gradients.
        done: whose gradients have been added before, and are left out.
        compute: the pass.
        compute_nothing: the same pass without sequences, which the other ranks need where they are in the midst of it.

    Raises:
        OutOfStepError: there is not even memory for nothing.
    """
    accumulation.begin(done)
    try:
        compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        accumulation.end()
        return None
    # not in the except block: there the traceback holds what the failed pass has computed
    with must_fit(
        "even without any sequence: the model's largest layer does not fit beside its shards; use more processes"
    ):
        return accumulation.recover(compute_nothing)


@contextmanager
def must_fit(what: str) -> Iterator[None]:
    """Nothing can be made smaller inside.

    Raises:
        OutOfStepError: memory runs out; the message goes on with `what`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfStepError(f"out of memory {what} (docs/memory.md)") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: of a GPU's allocator, a library on it, or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "can't allocate memory",
            "CUDA out of memory",
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_ALLOC",
        )
    )
