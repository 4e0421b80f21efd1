"""Weights for servers on the GPUs that train: every rank lends memory that the server on its GPU reads (CUDA IPC).

All ranks gather every tensor anyway. Each copies them, portion after portion, into a buffer of its own that lies alike
on all of them, so that one list of names and offsets tells every server where to read.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cohort.distributed import Ranks
from cohort.models import TensorSpec
from cohort.plan.defaults import PORTION_BYTES

_ALIGNMENT = 256
_PROBE_BYTES = 16  # at the beginning of the buffer

Portion = dict[str, int]  # names of tensors in their order, and where each begins in the buffer


class Lender:
    """One rank's buffer, for one update."""

    def __init__(self, specs: Sequence[TensorSpec], ranks: Ranks, device: torch.device):
        """Allocate the buffer; every rank does it.

        Args:
            specs: of all tensors that will be lent.
            ranks: of the run.
            device: of this rank.
        """
        self._ranks = ranks
        self._device = device
        self._portions = portions(specs)
        nbytes = {spec.name: _nbytes(spec) for spec in specs}
        ends = [offset + nbytes[name] for portion in self._portions for name, offset in portion.items()]
        buffer = allocate(max(ends, default=_PROBE_BYTES), device)
        probe = secrets.token_bytes(_PROBE_BYTES)
        buffer[:_PROBE_BYTES] = torch.frombuffer(bytearray(probe), dtype=torch.uint8)
        self._synchronize()
        told = ranks.gather((gpu_uuid(device), handle_of(buffer) | {"probe": probe.hex()}))
        self.handles: dict[str, Any] = dict(told or ())  # by GPU, how to open its buffer; rank 0's
        self._buffer: Tensor | None = buffer

    def stage(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Every weight, in the buffer. Every rank takes part, to the end.

        A portion is given out when it lies on all ranks, and stays until whoever takes its last tensor asks for more.
        """
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "a buffer is lent once"
        for portion in self._portions:
            lent = []
            for name, offset in portion.items():
                came, tensor = next(weights)
                assert came == name, "weights come as they were declared"
                place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                lent.append((name, place.copy_(tensor.detach())))
                del tensor
            self._synchronize()  # the servers' streams do not wait for ours
            self._ranks.largest(0)
            yield from lent
            self._ranks.largest(0)  # what the others lend is being read until here

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def gpu_uuid(device: torch.device) -> str:
    """Identify a GPU across processes, which number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def portions(specs: Sequence[TensorSpec]) -> list[Portion]:
    """Lay tensors out in a buffer that holds some of them at a time."""
    found: list[Portion] = []
    end = 0
    for spec in specs:
        if not found or end + _nbytes(spec) > PORTION_BYTES:
            found.append({})
            end = _ALIGNMENT  # after the probe
        found[-1][spec.name] = end
        end += -(-_nbytes(spec) // _ALIGNMENT) * _ALIGNMENT
    return found


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that another process can open.

    Expandable segments are shared through file descriptors that containers often do not let through
    ("pidfd_getfd: Operation not permitted"), so it lies outside of them: while they are off the allocator takes neither
    a new one nor room in an old one.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    if "expandable_segments:True" not in settings:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")  # others keep their values
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def handle_of(buffer: Tensor) -> dict[str, Any]:
    """How another process on this GPU opens the buffer, as JSON; the buffer has to be kept until it is done.

    The order of `reduce_tensor`'s arguments is that of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    (_, _, _, _, _, _, device, handle, storage_bytes, storage_offset, _, *counter_and_event) = arguments
    counter, counter_offset, event, event_sync_required = counter_and_event
    # torch keeps memory that was shared until its reader has let go, which one that was killed never does
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
