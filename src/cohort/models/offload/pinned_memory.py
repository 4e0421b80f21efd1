"""Pinned host memory of exactly the requested size.

PyTorch's pinned allocator rounds each tensor up to a power of two. Here memory is registered with the driver in one
piece, or in blocks, and split into tensors.
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

BLOCK_BYTES = 64 << 20  # registered at a time by `PinnedStack`
_ALIGNED = 64  # bytes, alignment of tensors


class PinnedMemory:
    """A zero-filled arena of pinned memory for tensors. It stays pinned until the last tensor is freed."""

    def __init__(self, num_bytes: int, device: torch.device):
        """Allocate memory, and pin it if the device is a GPU. Warn if the driver refuses.

        Args:
            num_bytes: result of `bytes_for`.
            device: device that copies from and to it.
        """
        whole = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)  # its pages are not shared with other allocations
        start = -whole.ctypes.data % mmap.PAGESIZE
        self._bytes = torch.from_numpy(whole[start : start + num_bytes])
        self._num_taken = 0
        if device.type == "cuda" and num_bytes:
            _register(whole, self._bytes.data_ptr(), num_bytes, device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, contiguous."""
        size = math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._num_taken : self._num_taken + size].view(dtype).view(tuple(shape))
        self._num_taken += _aligned(size)
        return tensor


class PinnedStack:
    """A stack allocator of pinned memory, for owners that are freed roughly in reverse order.

    Registering memory is slow, so blocks are kept and reused once their owners are freed. The size is the peak in use,
    rounded up to blocks.
    """

    def __init__(self, device: torch.device):
        """Make an empty stack for copies from and to `device`. Memory is pinned if that is a GPU."""
        self._device = device
        self._block_bytes = BLOCK_BYTES
        self._blocks: list[Tensor] = []
        self._taken: list[tuple[weakref.ref[object], int]] = []  # owners, and the end offset of each

    @property
    def num_bytes(self) -> int:
        """Size of all blocks."""
        return len(self._blocks) * self._block_bytes

    def take(self, num_bytes: int, owner: object) -> list[Tensor]:
        """Allocate uninitialized bytes, in one or more chunks, for the lifetime of `owner`.

        A device may still be reading them for the previous owner.
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
    """Return the bytes that `PinnedMemory` needs for such tensors."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _register(whole: np.ndarray, address: int, num_bytes: int, device: torch.device) -> None:
    """Pin the memory of `whole` until it is freed."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if status == 0:
        weakref.finalize(whole, cudart.cudaHostUnregister, address)  # runs before its memory is released
        return
    _clear_error(device)
    warnings.warn(
        f"{num_bytes / 1e9:.1f} GB of host memory could not be pinned (cudaHostRegister error {status}), so copies "
        f"to and from the GPU are slower; check the limit on locked memory (ulimit -l)",
        stacklevel=2,
    )


def _clear_error(device: torch.device) -> None:
    """Clear the driver's pending error with a dummy kernel; otherwise the next kernel would report it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)
