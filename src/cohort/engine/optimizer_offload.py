"""Updates on the host: gradients come from the device, the new weights go back, and the update is made in between.

What crosses the bus for each weight is its gradient (4 bytes in float32) and its copy (2 in bfloat16). Bringing the
masters and AdamW's moments to the device and back would be 24. The processor reads and writes those at the speed of its
own memory, which is several times the bus's.

torchao has a `CPUOffloadOptimizer`. It does not serve here: it copies a gradient when backward has made it, before the
norm of all gradients is known, so that nothing would be clipped; its masters have the dtype of the copy; its state is
not by name, so that another number of ranks could not go on with it; and it exists on GPUs only, so that nothing else
could test it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cohort.models.offload.pinned_memory import PinnedMemory

Pair = tuple[nn.Parameter, nn.Parameter]  # a weight on the device, and its master
_SLOTS = 2  # of each direction: one is filled while the other is used


class Lane(Protocol):
    """Copies between host and device, in one direction, one after another."""

    def begin(self) -> None:
        """What the device was told to compute so far comes before the copies from here on."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], object]:
        """Copy, now or later.

        Returns:
            waits until it is done.
        """
        ...

    def end(self) -> None:
        """The copies up to here come before what the device is told to compute from here on."""
        ...


class _Stream:
    """A stream of a GPU, beside the one that it computes in."""

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


class _AtOnce:
    """Between places in host memory there is nothing to wait for."""

    def begin(self) -> None:
        pass

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], object]:
        into.copy_(source)
        return bool

    def end(self) -> None:
        pass


def lane(device: torch.device) -> Lane:
    """Of copies between the host and a device."""
    return _Stream(device) if device.type == "cuda" else _AtOnce()


class HostUpdates:
    """Goes through the weights one after another, with the next gradient and the last weight on their way meanwhile."""

    def __init__(self, pairs: Sequence[Pair], *, make_lane: Callable[[torch.device], Lane] = lane):
        """Take the places that transfers go through: pinned, twice the largest weight in each direction.

        They are bytes, because not all weights need be of one dtype.

        Args:
            pairs: in the order of updates.
            make_lane: of a device.
        """
        self._pairs = pairs
        device = local(pairs[0][0]).device
        self._down, self._up = make_lane(device), make_lane(device)

        def slots(weights: Iterable[Tensor]) -> list[Tensor]:
            size = max(local(weight).nbytes for weight in weights)
            return [PinnedMemory(size, device).take([size], torch.uint8) for _ in range(_SLOTS)]

        self._gradients, self._copies = slots(m for _, m in pairs), slots(p for p, _ in pairs)

    @torch.no_grad()
    def run(self, update: Callable[[nn.Parameter], None]) -> None:
        """Update all masters and the device's weights, by the gradients that the device has.

        Args:
            update: of one master by its `grad`; it is done when this returns.
        """
        self._down.begin()
        self._up.begin()
        arrivals = [self._fetch(0)]
        departures: list[Callable[[], object]] = []
        for number, (_, master) in enumerate(self._pairs):
            if number + 1 < len(self._pairs):
                arrivals.append(self._fetch(number + 1))
            arrivals[number]()
            master.grad = _as(master, _view(self._gradients, number, master))
            update(master)
            master.grad = None
            if number >= _SLOTS:
                departures[number - _SLOTS]()  # the slot is free
            departures.append(self._send(number))
        self._up.end()

    def _fetch(self, number: int) -> Callable[[], object]:
        parameter, master = self._pairs[number]
        assert parameter.grad is not None, "every weight has a gradient when it is updated"
        return self._down.copy(_view(self._gradients, number, master), local(parameter.grad))

    def _send(self, number: int) -> Callable[[], object]:
        parameter, master = self._pairs[number]
        slot = _view(self._copies, number, parameter)
        slot.copy_(local(master))
        return self._up.copy(local(parameter), slot)


def _view(slots: Sequence[Tensor], number: int, weight: Tensor) -> Tensor:
    """The bytes of a slot as this rank's part of a weight."""
    own = local(weight)
    return slots[number % _SLOTS][: own.nbytes].view(own.dtype).view(own.shape)


def local(parameter: Tensor) -> Tensor:
    """What of a parameter is on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _as(master: nn.Parameter, own: Tensor) -> Tensor:
    """A rank's part of what is sharded as a master, as a whole; `DTensor.from_local` would move it to the GPU."""
    return DTensor(own, master._spec, requires_grad=False) if isinstance(master, DTensor) else own
