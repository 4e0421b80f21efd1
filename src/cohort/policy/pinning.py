"""Host memory that a GPU copies from and to by itself, of exactly the size that is asked for.

PyTorch's allocator of pinned memory rounds every tensor up to a power of two. Here memory is registered with the driver
in one piece, or block by block, and cut into tensors.
"""

import math
import mmap
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20  # that a `PinnedStack` registers at a time
_ALIGNED = 64  # bytes at which each tensor begins


class PinnedMemory:
    """Zeros for tensors that are taken one after another. It is pinned until the last of them is gone."""

    def __init__(self, num_bytes: int, device: torch.device):
        """Allocate it, and pin it where the device is a GPU; where the driver refuses, warn and leave it as it is.

        Args:
            num_bytes: by `bytes_for`.
            device: that copies.
        """
        whole = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)  # its pages are nobody else's
        start = -whole.ctypes.data % mmap.PAGESIZE
        self._bytes = torch.from_numpy(whole[start : start + num_bytes])
        self._num_taken = 0
        if device.type == "cuda" and num_bytes:
            _register(whole, self._bytes.data_ptr(), num_bytes, device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, contiguous."""
        size = math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._num_taken : self._num_taken + size].view(dtype).view(tuple(shape))
        self._num_taken += _aligned(size)
        return tensor


class PinnedStack:
    """Pinned bytes for owners that are gone in about the opposite order to that in which they came.

    Registering memory is slow. So blocks are kept, and are taken again when their owners are gone, until the stack and
    everything that was taken from it are gone too: never more than the most that was taken at a time, and part of a
    block.
    """

    def __init__(self, device: torch.device):
        """Nothing is allocated yet. `device` is the one that copies; memory is pinned where that is a GPU."""
        self._device = device
        self._block_bytes = BLOCK_BYTES
        self._blocks: list[Tensor] = []
        self._taken: list[tuple[weakref.ref[object], int]] = []  # owners, and where the memory of each ends

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return len(self._blocks) * self._block_bytes

    def take(self, num_bytes: int, owner: object) -> list[Tensor]:
        """Bytes in one or more pieces that are the owner's while it lives, whatever is in them.

        A device may still be copying from them for the owner before.
        """
        while self._taken and self._taken[-1][0]() is None:
            self._taken.pop()
        start = self._taken[-1][1] if self._taken else 0
        self._taken.append((weakref.ref(owner), start + _aligned(num_bytes)))
        pieces, end = [], start + num_bytes
        while start < end:
            block, offset = divmod(start, self._block_bytes)
            if block == len(self._blocks):
                self._blocks.append(
                    PinnedMemory(self._block_bytes, self._device).take([self._block_bytes], torch.uint8)
                )
            size = min(end - start, self._block_bytes - offset)
            pieces.append(self._blocks[block][offset : offset + size])
            start += size
        return pieces


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """What `PinnedMemory` needs for tensors of the shapes and dtypes of these."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _register(whole: np.ndarray, address: int, num_bytes: int, device: torch.device) -> None:
    """Pin what is in `whole` until that is freed."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if status == 0:
        weakref.finalize(whole, cudart.cudaHostUnregister, address)  # which comes before its memory is given back
        return
    _forget_error(device)
    warnings.warn(
        f"{num_bytes / 1e9:.1f} GB of host memory cannot be pinned (cudaHostRegister: error {status}; is there a limit "
        f"on locked memory, `ulimit -l`?); copies to and from the GPU are slower",
        stacklevel=2,
    )


def _forget_error(device: torch.device) -> None:
    """The driver keeps an error for the next check, which is that of a kernel: one that is of no use."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)
