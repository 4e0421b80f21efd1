"""Share weights with servers on the training GPUs through CUDA IPC.

All ranks gather every tensor anyway. Each copies them, one bucket at a time, into a buffer on its own GPU, from which
the server on that GPU reads. The layout is the same on all ranks, so one list of names and offsets serves all servers.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from cohort.models import TensorSpec
from cohort.plan.defaults import BUCKET_BYTES
from cohort.ranks.collectives import Ranks
from cohort.rollout.engines.servers.server_side.cohort_weight_group import gpu_uuid

_ALIGNMENT = 256
_PROBE_BYTES = 16  # at the beginning of the buffer

Bucket = dict[str, int]  # offsets in the buffer by tensor name, in order
IpcHandle = dict[str, str | int]  # as JSON values; see `ipc_handle`


class IpcBuffer:
    """A rank's shared buffer for one weight update."""

    def __init__(self, specs: Sequence[TensorSpec], ranks: Ranks, device: torch.device):
        """Allocate the buffer. Called on every rank.

        Args:
            specs: all tensors that will be shared.
            ranks: training processes.
            device: device of this rank.
        """
        self._ranks = ranks
        self._device = device
        self._buckets = make_buckets(specs)
        nbytes = {spec.name: _nbytes(spec) for spec in specs}
        ends = [offset + nbytes[name] for bucket in self._buckets for name, offset in bucket.items()]
        buffer = allocate(max(ends, default=_PROBE_BYTES), device)
        probe = secrets.token_bytes(_PROBE_BYTES)
        buffer[:_PROBE_BYTES] = torch.frombuffer(bytearray(probe), dtype=torch.uint8)
        self._synchronize()
        handles = ranks.gather((gpu_uuid(device), ipc_handle(buffer) | {"probe": probe.hex()}))
        self.handles: dict[str, IpcHandle] = dict(handles or ())  # IPC handles by GPU; empty but on rank 0
        self._buffer: Tensor | None = buffer

    def stage(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a view of the buffer. A collective: every rank must iterate to the end.

        A bucket is yielded once all ranks have it, and stays valid until the tensor after its last one is requested.
        """
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "a buffer is used for one update"
        for bucket in self._buckets:
            staged = []
            for name, offset in bucket.items():
                received, tensor = next(weights)
                assert received == name, "weights must arrive in the declared order"
                place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                staged.append((name, place.copy_(tensor.detach())))
                del tensor
            self._synchronize()  # the servers' streams do not wait for this one
            self._ranks.all_reduce_max(0)
            yield from staged
            self._ranks.all_reduce_max(0)  # servers may read the other ranks' buffers until here

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def make_buckets(specs: Sequence[TensorSpec]) -> list[Bucket]:
    """Divide tensors into buckets of at most `BUCKET_BYTES`; a larger tensor gets its own."""
    found: list[Bucket] = []
    end = 0
    for spec in specs:
        if not found or end + _nbytes(spec) > BUCKET_BYTES:
            found.append({})
            end = _ALIGNMENT  # after the probe
        found[-1][spec.name] = end
        end += -(-_nbytes(spec) // _ALIGNMENT) * _ALIGNMENT
    return found


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate GPU memory that another process can open.

    Expandable segments are shared through file descriptors, which containers often block ("pidfd_getfd: Operation not
    permitted"). They are therefore disabled during this allocation, which also keeps it out of existing ones.
    """
    settings = _allocator_settings()
    if "expandable_segments:True" not in settings:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")  # keep the other settings
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """Return the settings of PyTorch's allocator. torch 2.11 does not tell: what a run was started with."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    set_outside = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return set_outside or "expandable_segments:True"  # as the trainer sets it


def ipc_handle(buffer: Tensor) -> IpcHandle:
    """Return the CUDA IPC handle of the buffer as JSON values; keep the buffer until the reader is done.

    `reduce_tensor` returns arguments in the order of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    (_, _, _, _, _, _, device, handle, storage_bytes, storage_offset, _, *counter_and_event) = arguments
    counter, counter_offset, event, event_sync_required = counter_and_event
    # PyTorch keeps shared memory until its reader releases it, which a killed reader never does
    with suppress(RuntimeError):
        torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=device)
    return {
        "handle": handle.hex(),
        "storage_bytes": storage_bytes,
        "storage_offset_bytes": storage_offset,
        "ref_counter_handle": counter.hex(),
        "ref_counter_offset": counter_offset,
        "event_handle": event.hex(),
        "event_sync_required": event_sync_required,
    }


def _nbytes(spec: TensorSpec) -> int:
    return int(torch.Size(spec.shape).numel()) * spec.dtype.itemsize
