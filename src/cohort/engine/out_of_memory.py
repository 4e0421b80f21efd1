"""What an exception says about memory, and what can be done about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch

from cohort.errors import OutOfStepError, TrainingError

# Allocations that have failed, in the words of PyTorch and of the libraries that it calls.
_FAILED_ALLOCATIONS = (
    "CUDA out of memory",  # PyTorch's own allocator
    "CUDA error: out of memory",  # the CUDA runtime
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",  # the driver, where a kernel is loaded or launched
    "CUBLAS_STATUS_ALLOC_FAILED",
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
