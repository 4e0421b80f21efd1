"""Weights in host memory: pinned memory, master weights, and frozen weights that are copied to the GPU while in use.

PyTorch's pinned allocator rounds each tensor up to a power of two. Here memory is registered with the driver in one
piece, or in blocks, and split into tensors.

Master weights have a copy in the compute dtype on the device, which forward, backward and samplers use. The optimizer
updates the master weights, and these are saved. So nothing is rounded twice, and small updates are not lost.
"""

import math
import mmap
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

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


class MasterWeights:
    """Master weights of a model on the host, including frozen ones, sharded like the model.

    Attributes:
        tree: empty modules that hold the master weights under their names in the model.
        dtype: dtype of the first weight. Models may keep a few weights in a wider dtype.
    """

    def __init__(self, model: Any, compute_dtype: torch.dtype):
        """Copy the weights of `model` to the host, and round those of the model.

        Args:
            model: a loaded model, not used yet. If sharded, FSDP2 must not have inspected its dtypes.
            compute_dtype: dtype of the weights left in the model.
        """
        self.tree = nn.Module()
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=parameter.requires_grad)
            _put(self.tree, name, master)
        self.dtype = next(self.tree.parameters()).dtype
        self._by_name = dict(self.tree.named_parameters())
        self._model = model
        round_weights(model, compute_dtype)
        for _, parameter, master in self.pairs():
            parameter.grad_dtype = master.dtype  # accumulate gradients in the dtype of the master weights

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield name, device copy and master weight of each trained weight."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self._by_name[name]

    def of(self, name: str) -> Tensor | None:
        """Return the master weight of a saved tensor; None for buffers."""
        return self._by_name.get(name)


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model to `dtype`, but not its buffers."""

    def cast_weight(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor

    model._apply(cast_weight)


def _put(tree: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(tree.named_children()):
            tree.add_module(part, nn.Module())
        tree = cast(nn.Module, getattr(tree, part))
    tree.register_parameter(last, parameter)


class OffloadedWeights:
    """Weights of a frozen model in pinned host memory."""

    def __init__(self, model: Any, device: torch.device):
        """Move the weights to the host.

        Args:
            model: a model that is not sharded.
            device: device that it computes on.
        """
        self._device = device
        self._tensors = [*model.parameters(), *model.buffers()]  # tied ones once
        memory = PinnedMemory(bytes_for(self._tensors), device)
        for tensor in self._tensors:
            tensor.data = memory.take(tensor.shape, tensor.dtype).copy_(tensor.data)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the device. Changes to them are lost."""
        hosts = [tensor.data for tensor in self._tensors]
        try:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host
