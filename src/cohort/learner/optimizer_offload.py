"""CPU-offloaded optimizer steps: copy gradients to the host, update there, copy the new weights back.

Per weight, 4 bytes (float32 gradient) and 2 bytes (bfloat16 copy) cross the bus. Moving master weights and AdamW's
moments to the device and back would take 24. The CPU reads and writes those at the speed of host memory, which is
several times that of the bus.

torchao's `CPUOffloadOptimizer` does not fit. It copies a gradient right after backward, before the norm of all
gradients is known, so clipping would have no effect. Its master weights have the dtype of the copy. Its state is not
keyed by name, so another number of ranks could not resume from it. And it needs a GPU, so nothing else could test it.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cohort.models.host_memory import PinnedMemory

Pair = tuple[nn.Parameter, nn.Parameter]  # weight on the device, and its master weight
_SLOTS = 2  # buffers per direction: one is filled while the other is used


class CopyStream:
    """Ordered copies between host and device in one direction; this base class copies synchronously on the host."""

    def begin(self) -> None:
        """Make later copies wait for the work that is queued on the device."""

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], object]:
        """Start a copy; return a function that waits until it is done."""
        into.copy_(source)
        return bool

    def end(self) -> None:
        """Make later work on the device wait for the copies so far."""


class _CudaCopyStream(CopyStream):
    """Asynchronous copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], object]:
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return self._stream.record_event().synchronize

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream(device: torch.device) -> CopyStream:
    """Make a stream of copies between the host and a device."""
    return _CudaCopyStream(device) if device.type == "cuda" else CopyStream()


class OffloadedUpdates:
    """Update weights on the host one by one, overlapped with copies of the next gradient and the previous weight."""

    def __init__(self, pairs: Sequence[Pair], *, make_stream: Callable[[torch.device], CopyStream] = copy_stream):
        """Allocate pinned staging buffers: twice the largest weight in each direction.

        They are bytes, because weights may differ in dtype.

        Args:
            pairs: weights and master weights, in the order of updates.
            make_stream: makes the stream of copies for a device.
        """
        self._pairs = pairs
        device = to_local(pairs[0][0]).device
        self._to_host, self._to_device = make_stream(device), make_stream(device)

        def buffers(weights: Iterable[Tensor]) -> list[Tensor]:
            size = max(to_local(weight).nbytes for weight in weights)
            return [PinnedMemory(size, device).take([size], torch.uint8) for _ in range(_SLOTS)]

        self._gradients, self._copies = buffers(m for _, m in pairs), buffers(p for p, _ in pairs)

    @torch.no_grad()
    def run(self, update: Callable[[nn.Parameter], None]) -> None:
        """Update all master weights from the gradients on the device, and copy the results back.

        Args:
            update: updates one master weight from its `grad`, synchronously.
        """
        self._to_host.begin()
        self._to_device.begin()
        arrivals = [self._fetch(0)]
        departures: list[Callable[[], object]] = []
        for number, (_, master) in enumerate(self._pairs):
            if number + 1 < len(self._pairs):
                arrivals.append(self._fetch(number + 1))
            arrivals[number]()
            master.grad = _like(master, _view(self._gradients, number, master))
            update(master)
            master.grad = None
            if number >= _SLOTS:
                departures[number - _SLOTS]()  # until the slot is free
            departures.append(self._send(number))
        self._to_device.end()

    def _fetch(self, number: int) -> Callable[[], object]:
        parameter, master = self._pairs[number]
        assert parameter.grad is not None, "every weight has a gradient when it is updated"
        return self._to_host.copy(_view(self._gradients, number, master), to_local(parameter.grad))

    def _send(self, number: int) -> Callable[[], object]:
        parameter, master = self._pairs[number]
        slot = _view(self._copies, number, parameter)
        slot.copy_(to_local(master))
        return self._to_device.copy(to_local(parameter), slot)


def _view(slots: Sequence[Tensor], number: int, weight: Tensor) -> Tensor:
    """View the bytes of a slot as this rank's shard of a weight."""
    own = to_local(weight)
    return slots[number % _SLOTS][: own.nbytes].view(own.dtype).view(own.shape)


def to_local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _like(master: nn.Parameter, own: Tensor) -> Tensor:
    """Wrap a shard as a DTensor like its master weight. `DTensor.from_local` would move it to the GPU."""
    return DTensor(own, master._spec, requires_grad=False) if isinstance(master, DTensor) else own
