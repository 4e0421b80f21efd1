"""What an exception says about memory, and what can be done about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import torch

from cohort.errors import OutOfStepError, TrainingError
from cohort.records import TrainSequence

# Allocations that have failed, in the words of PyTorch and of the libraries that it calls.
_FAILED_ALLOCATIONS = (
    "CUDA out of memory",  # PyTorch's own allocator
    "CUDA error: out of memory",  # the CUDA runtime
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",  # the driver, where a kernel is loaded or launched
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(",  # no room for the handle
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "resource allocation failed when calling `cusparse",  # CUSPARSE_STATUS_ALLOC_FAILED in words
    "insufficient resources when calling `cusparse",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc",
)
_NCCL = ("NCCL error", "NCCL Error", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError")
_INSIDE_NCCL = ("out of memory", "Failed to CUDA", "Failed to malloc", "Cannot allocate memory")


class Meaning(Enum):
    """What an exception means for what was being computed."""

    SMALLER_BATCH = auto()  # an allocation failed, and the process is as sound as before: less at a time may fit
    DEAD_COMMUNICATOR = auto()  # an allocation failed in the midst of a collective, which nobody can finish
    OTHER = auto()  # nothing of memory that a smaller batch leaves free


def meaning_of(error: BaseException) -> Meaning:
    """What an exception says about memory: of a GPU's allocators, a library on it, NCCL, or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Meaning.SMALLER_BATCH
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingError):
        return Meaning.OTHER
    text = str(error)
    if any(sign in text for sign in _NCCL):
        ran_out = any(sign in text for sign in _INSIDE_NCCL)
        return Meaning.DEAD_COMMUNICATOR if ran_out else Meaning.OTHER
    return Meaning.SMALLER_BATCH if any(sign in text for sign in _FAILED_ALLOCATIONS) else Meaning.OTHER


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out where less at a time may fit.

    Raises:
        OutOfStepError: memory ran out inside NCCL.
    """
    meaning = meaning_of(error)
    if meaning is Meaning.DEAD_COMMUNICATOR:
        raise OutOfStepError(
            "out of memory inside NCCL, which takes its buffers beside PyTorch's memory: its communicator cannot be "
            "used again, so this process ends. Lower train.micro_batch_tokens, or use more processes (docs/memory.md)"
        ) from error
    return meaning is Meaning.SMALLER_BATCH


@dataclass(frozen=True, slots=True)
class TooLarge:
    """What did not fit into memory."""

    num_tokens: int  # 0 of an empty micro-batch
    whole: str | None = None  # of what cannot be split: its name, and what would help

    def half_of(self, budget: int) -> int:
        """Half of a budget, or of what did not fit if that is less.

        What cannot be split may fit the next time: beside smaller micro-batches memory is less in pieces. That is tried
        until it is larger than the budget.

        Raises:
            OutOfStepError: nothing becomes smaller with the budget.
        """
        if self.whole is not None and budget < max(2, self.num_tokens):
            raise OutOfStepError(f"out of memory {self.whole} (docs/memory.md)")
        return max(1, min(budget, self.num_tokens or budget) // 2)


NOTHING = TooLarge(
    0, "even without any sequence: the model's largest layer does not fit beside its shards; use more processes"
)


def too_large(num_tokens: int, sequences: Sequence[TrainSequence]) -> TooLarge:
    """A micro-batch that did not fit. Sequences of one trajectory may have to stay together."""
    if not sequences:
        return NOTHING
    if len({s.trajectory for s in sequences}) > 1:
        return TooLarge(num_tokens)
    what = "a single sequence" if len(sequences) == 1 else f"the {len(sequences)} sequences of a single trajectory,"
    return TooLarge(
        num_tokens,
        f"on {what} of {num_tokens} tokens, which cannot be split. Set model.gradient_checkpointing: true "
        f"where it is not, or lower rollout.max_completion_tokens, or use more processes",
    )


def too_large_prompt(num_tokens: int) -> TooLarge:
    """The prompt of a stream that did not fit; of 0 tokens where this rank had none."""
    if num_tokens == 0:
        return NOTHING
    return TooLarge(
        num_tokens,
        f"on a prompt of {num_tokens} tokens, which cannot be split. Set model.gradient_checkpointing: true where it "
        f"is not, or lower rollout.max_prompt_tokens",
    )


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
