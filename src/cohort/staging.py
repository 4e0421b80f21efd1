"""Many small tensors from the host to a device by one copy."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_ALIGNED = 16  # bytes at which each tensor begins, so that all of them can be read as what they are
T = TypeVar("T")


def to_device(record: T, device: torch.device, dtype: torch.dtype | None = None) -> T:
    """A frozen dataclass or tuple with all tensors in it on a device, however deep they are in such.

    On another device they are views of one tensor. It comes from a pinned buffer of its own, which PyTorch gives to
    nobody else before the copy is done; so nothing waits.

    Args:
        record: its tensors are on the host.
        device: that they go to; nothing is copied to the host itself.
        dtype: of real numbers; None leaves them as they are.
    """
    tensors = list(_tensors(record))
    dtypes = [dtype if dtype is not None and x.is_floating_point() else x.dtype for x in tensors]
    if device.type == "cpu":
        moved = [x.to(wanted) for x, wanted in zip(tensors, dtypes, strict=True)]
    else:
        moved = _by_one_copy(tensors, dtypes, device)
    placed: T = _with(record, iter(moved))
    return placed


def _by_one_copy(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    starts, end = [], 0
    for x, dtype in zip(tensors, dtypes, strict=True):
        starts.append(end)
        end += -(-x.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED

    def views(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + x.numel() * dtype.itemsize].view(dtype).view(x.shape)
            for start, x, dtype in zip(starts, tensors, dtypes, strict=True)
        ]

    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, x in zip(views(staged), tensors, strict=True):
        view.copy_(x)
    return views(staged.to(device, non_blocking=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in it, in the order of fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors, in the order of `_tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_with(item, tensors) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _with(getattr(value, field.name), tensors) for field in fields(value)})
    return value
