"""What running out of memory looks like, in the words of those that say so, and what each means."""

from dataclasses import replace

import pytest
import torch
from torch.distributed import DistBackendError

from cohort.errors import DoesNotFitError
from cohort.learner.forward_backward import LocalAccumulation, try_pass
from cohort.learner.memory_fallback import (
    OutOfMemory,
    is_out_of_memory,
    micro_batch_out_of_memory,
    must_fit,
)
from tiny import random_sequences

ASYNC = "\nCUDA kernel errors might be asynchronously reported at some other API call"
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
SMALLER_BATCH: list[tuple[type[Exception], str]] = [
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a total capacity of"),
    (torch.AcceleratorError, "CUDA error: out of memory" + ASYNC),
    (torch.AcceleratorError, "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https:" + ASYNC),
    (RuntimeError, "CUDA error: out of memory"),  # before torch.AcceleratorError
    (RuntimeError, "CUDA driver error: out of memory"),
    (RuntimeError, "Triton Error [CUDA]: out of memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    # a handle that there is no room for; backward makes one of its own, in its thread
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`."),
    (RuntimeError, "CUDA error: resource allocation failed when calling `cusparseCreate(handle)`"),
    (RuntimeError, "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( handle, opA,"),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried"),
    (RuntimeError, "std::bad_alloc"),
    (MemoryError, "std::bad_alloc"),
    (MemoryError, "Unable to allocate 3.64 TiB for an array with shape (1000000000000,) and data type float32"),
]
DEAD_COMMUNICATOR = [
    NCCL + "Cuda failure 'out of memory'",
    NCCL + "Cuda failure 2 'out of memory'",
    NCCL + "Failed to CUDA calloc async 4 bytes",
    NCCL + "Failed to CUDA malloc 6291456 bytes",
    NCCL + "Failed to CUDA host alloc 4194304 bytes",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details)\nncclSystemError: System call (e.g. socket, malloc) or external library call failed "
    "or device error. \nLast error:\nFailed to malloc 2152 bytes",
    "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCUDA error: out of memory",
]
OTHER: list[tuple[type[Exception], str]] = [
    # a smaller batch has as much shared memory per block
    (RuntimeError, "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes"),
    (torch.AcceleratorError, "CUDA error: too many resources requested for launch" + ASYNC),
    (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered" + ASYNC),
    (torch.AcceleratorError, "CUDA error: device-side assert triggered" + ASYNC),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    (DistBackendError, NCCL + "Cuda failure 1 'invalid argument'"),
    (RuntimeError, "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3412"),
    (DoesNotFitError, "out of memory on a single sequence of 9000 tokens, which cannot be split"),
    (ValueError, "CUDA out of memory"),
]


@pytest.mark.parametrize(("kind", "message"), SMALLER_BATCH)
def test_a_smaller_batch_helps(kind: type[Exception], message: str):
    assert is_out_of_memory(kind(message))


@pytest.mark.parametrize(("kind", "message"), OTHER)
def test_a_smaller_batch_does_not_help(kind: type[Exception], message: str):
    assert not is_out_of_memory(kind(message))


def test_memory_that_really_runs_out():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_tritons_shared_memory_is_no_memory():
    errors = pytest.importorskip("triton.runtime.errors")
    assert not is_out_of_memory(errors.OutOfResources(131072, 101376, "shared memory"))


@pytest.mark.parametrize("message", DEAD_COMMUNICATOR)
def test_nccl_that_runs_out_ends_the_process(message: str):
    """Nothing is computed again: neither the rest of the micro-batch, nor a smaller one."""

    def compute() -> None:
        raise DistBackendError(message)

    def compute_nothing() -> None:
        pytest.fail("the communicator was used again")

    expected = "out of memory inside NCCL.*this process exits"
    accumulation = LocalAccumulation((), None)
    with pytest.raises(DoesNotFitError, match=expected):
        try_pass(accumulation, compute, compute_nothing)
    with pytest.raises(DoesNotFitError, match=expected), must_fit("in the update"):
        compute()
    with pytest.raises(DoesNotFitError, match=expected) as caught:
        is_out_of_memory(DistBackendError(message))
    assert str(caught.value.__cause__) == message


def test_the_budget_after_memory_ran_out():
    """Half of it, or of what did not fit where that is less."""
    one, two, three = random_sequences([(1, [1, 1, 1])])
    assert micro_batch_out_of_memory(700, [one, two, three]).halve(1000) == 350
    assert micro_batch_out_of_memory(3, [one, two]).halve(1000) == 1
    assert micro_batch_out_of_memory(700, [one]).halve(1000) == 350
    assert micro_batch_out_of_memory(0, []).halve(1000) == 500
    assert OutOfMemory(700).halve(500) == 250


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "budget", "message"),
    [
        (700, 1, 350, "out of memory on a single sequence of 700 tokens, which cannot be split; set"),
        (1, 1, 1, "out of memory on a single sequence of 1 tokens"),
        (700, 2, 350, "out of memory on the 2 sequences of a single trajectory, of 700 tokens, which cannot be split"),
        (0, 0, 1, "out of memory even on an empty micro-batch: the model's largest layer does not fit"),
    ],
)
def test_the_end_where_nothing_becomes_smaller(num_tokens: int, num_sequences: int, budget: int, message: str):
    of_one = [replace(s, trajectory=0) for s in random_sequences([(1, [1] * num_sequences)])]
    with pytest.raises(DoesNotFitError, match=message):
        micro_batch_out_of_memory(num_tokens, of_one).halve(budget)
