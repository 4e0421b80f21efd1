"""Move a record of many small tensors to a device in a single copy."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_ALIGNED = 16  # bytes; alignment of each tensor, enough for every dtype
T = TypeVar("T")


def to_device(record: T, device: torch.device, dtype: torch.dtype | None = None) -> T:
    """Return a copy of a (nested) frozen dataclass or tuple with all its tensors on `device`.

    On a GPU they are views of one tensor, copied asynchronously from a pinned buffer. PyTorch does not reuse the buffer
    before the copy is done, so nothing waits.

    Args:
        record: record with tensors on the host.
        device: destination; for the CPU nothing is copied.
        dtype: cast floating-point tensors to it; None keeps theirs.
    """
    tensors = list(_tensors(record))
    dtypes = [dtype if dtype is not None and x.is_floating_point() else x.dtype for x in tensors]
    if device.type == "cpu":
        moved = [x.to(wanted) for x, wanted in zip(tensors, dtypes, strict=True)]
    else:
        moved = _copy_together(tensors, dtypes, device)
    placed: T = _replace_tensors(record, iter(moved))
    return placed


def _copy_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    starts, end = [], 0
    for x, dtype in zip(tensors, dtypes, strict=True):
        starts.append(end)
        end += -(-x.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED

    def views(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + x.numel() * dtype.itemsize].view(dtype).view(x.shape)
            for start, x, dtype in zip(starts, tensors, dtypes, strict=True)
        ]

    staged = _staging_buffer(end, pinned=device.type == "cuda")
    for view, x in zip(views(staged), tensors, strict=True):
        view.copy_(x)
    return views(staged.to(device, non_blocking=True))


def _staging_buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate a buffer on the host. If it cannot be pinned, warn: smaller micro-batches would not help."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:  # the message may be "CUDA error: out of memory", though no GPU memory is involved
        if not pinned:
            raise
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"{num_bytes} bytes of host memory could not be pinned ({reason}), so copies to the GPU block; check free "
            "host memory and the limit on locked memory (ulimit -l)",
            RuntimeWarning,
            stacklevel=2,
        )
        return torch.empty(num_bytes, dtype=torch.uint8)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a nested record, in field order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return `value` with its tensors replaced, in the order of `_tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_replace_tensors(item, tensors) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _replace_tensors(getattr(value, field.name), tensors) for field in fields(value)}
        )
    return value
