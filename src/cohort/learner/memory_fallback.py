"""What happens when memory runs out: recognize the error, choose a smaller token budget, and repack the step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.errors import DoesNotFitError, TrainingError
from cohort.models import Policy
from cohort.packing import pack
from cohort.packing.batch import TrainBatch
from cohort.ranks.collectives import Ranks
from cohort.records import TrainSequence

# Failed allocations, as reported by PyTorch and the libraries that it calls.
_FAILED_ALLOCATIONS = (
    "CUDA out of memory",  # PyTorch's own allocator
    "CUDA error: out of memory",  # the CUDA runtime
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",  # the driver, when loading or launching a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(",  # no room for the handle
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "resource allocation failed when calling `cusparse",  # CUSPARSE_STATUS_ALLOC_FAILED
    "insufficient resources when calling `cusparse",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc",
)
_NCCL = ("NCCL error", "NCCL Error", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError")
_INSIDE_NCCL = ("out of memory", "Failed to CUDA", "Failed to malloc", "Cannot allocate memory")


@dataclass(slots=True)
class TokenBudget:
    """Maximum tokens of a micro-batch (`train.micro_batch_tokens`), shared by all models trained on a device."""

    tokens: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out and a smaller batch may fit.

    Args:
        error: exception of PyTorch, a CUDA library, NCCL or the host's allocator.

    Raises:
        DoesNotFitError: memory ran out inside a collective of NCCL, which cannot be completed.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingError):
        return False
    text = str(error)
    if not any(sign in text for sign in _NCCL):
        return any(sign in text for sign in _FAILED_ALLOCATIONS)
    if any(sign in text for sign in _INSIDE_NCCL):
        raise DoesNotFitError(
            "out of memory inside NCCL, which allocates outside PyTorch. Its communicator is unusable, so this process "
            "exits; lower train.micro_batch_tokens or use more processes (docs/memory.md)"
        ) from error
    return False


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A pass that did not fit into memory."""

    num_tokens: int  # 0 if it was empty
    indivisible: str | None = None  # if it cannot be split: the rest of the error message

    def halve(self, budget: int) -> int:
        """Return the token budget of the retry: half of `budget`, or of the failed pass if that is smaller.

        Something indivisible is retried while it is within the budget: it may fit next time, because smaller
        micro-batches leave memory less fragmented.

        Raises:
            DoesNotFitError: a smaller budget does not help.
        """
        if self.indivisible is not None and budget < max(2, self.num_tokens):
            raise DoesNotFitError(f"out of memory {self.indivisible} (docs/memory.md)")
        return max(1, min(budget, self.num_tokens or budget) // 2)


EMPTY_OUT_OF_MEMORY = OutOfMemory(
    0, "even on an empty micro-batch: the model's largest layer does not fit next to the shards; use more processes"
)


def micro_batch_out_of_memory(num_tokens: int, sequences: Sequence[TrainSequence]) -> OutOfMemory:
    """Describe a micro-batch that did not fit. It can be split if it has several trajectories."""
    if not sequences:
        return EMPTY_OUT_OF_MEMORY
    if len({s.trajectory for s in sequences}) > 1:
        return OutOfMemory(num_tokens)
    what = "a single sequence" if len(sequences) == 1 else f"the {len(sequences)} sequences of a single trajectory,"
    lower = "rollout.max_completion_tokens (with turns: max_trajectory_tokens), or use more processes"
    return OutOfMemory(num_tokens, _cannot_split(what, num_tokens, lower))


def prefix_out_of_memory(num_tokens: int) -> OutOfMemory:
    """Describe the prefix of a split group that did not fit; `num_tokens` is 0 if this rank had none."""
    if num_tokens == 0:
        return EMPTY_OUT_OF_MEMORY
    return OutOfMemory(num_tokens, _cannot_split("a prompt", num_tokens, "rollout.max_prompt_tokens"))


def _cannot_split(what: str, num_tokens: int, key: str) -> str:
    return (
        f"on {what} of {num_tokens} tokens, which cannot be split; set model.gradient_checkpointing: true if it is "
        f"off, or lower {key}"
    )


@contextmanager
def must_fit(what: str) -> Iterator[None]:
    """Context in which running out of memory is fatal.

    Raises:
        DoesNotFitError: memory ran out; the message is "out of memory" and `what`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(f"out of memory {what} (docs/memory.md)") from error


def repack(
    batch: TrainBatch,
    tensors: Sequence[Mapping[int, Tensor]],
    *,
    policy: Policy,
    ranks: Ranks,
    micro_batch_tokens: int,
) -> tuple[TrainBatch, tuple[dict[int, Tensor], ...]]:
    """Repack a step under another token budget, as if it had been packed under it from the start.

    Sequences may move to other ranks, because each budget balances ranks anew. Their tensors move with them. Every rank
    calls this.

    Args:
        batch: this rank's batch.
        tensors: mappings of sequence index -> [C], which may lack some sequences.
        policy: computes the sequences.
        ranks: all ranks.
        micro_batch_tokens: the new budget.

    Returns:
        This rank's batch, and the tensors of its sequences on the policy's device.
    """
    own = [{n: values.to("cpu", copy=True) for n, values in mapping.items()} for mapping in tensors]
    per_dp_rank = None
    if (gathered := ranks.gather((batch.sequences, own))) is not None:
        leaders = [gathered[rank] for rank in ranks.dp_leaders]
        sequences = sorted((s for some, _ in leaders for s in some), key=lambda s: s.index)
        batches = pack(
            sequences,
            micro_batch_tokens=micro_batch_tokens,
            dp_size=ranks.dp_size,
            share_prompts=policy.shares_prompts,
            padded=policy.layout == "padded",
            sequence_level=batch.sequence_level,
        )
        merged = [{n: x for _, mappings in leaders for n, x in mappings[i].items()} for i in range(len(tensors))]
        per_dp_rank = [
            (new, [{s.index: values[s.index] for s in new.sequences if s.index in values} for values in merged])
            for new in batches
        ]
    own_batch, own = ranks.scatter(per_dp_rank)
    return own_batch, tuple({n: values.to(policy.device) for n, values in mapping.items()} for mapping in own)
