"""Micro-batches on their way to a device: one copy, and every tensor as it was."""

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohort.packing import collate, collate_part, collate_prompt
from cohort.packing import to_device as host_to_device
from cohort.packing.batch import MicroBatch
from cohort.packing.to_device import to_device
from fake_cuda import fake_cuda
from tiny import random_sequences

META, CPU = torch.device("meta"), torch.device("cpu")
GROUPS = [(5, [7, 1, 70]), (90, [3, 66]), (4, [1]), (2, [9, 9])]


def rows() -> list[MicroBatch]:
    sequences = random_sequences(GROUPS)
    first = sequences[:3]
    return [
        collate(sequences, share_prompts=True),
        collate(sequences, share_prompts=False),
        collate([], share_prompts=True),
        collate_part(first),
        collate_prompt(first[0].token_ids[:5], num_completions=3),
    ]


class Copies(TorchDispatchMode):
    """Counts what goes from the host to another device, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.device == CPU for x in sources) and any(
            isinstance(x, Tensor) and x.device != CPU for x in tree_leaves(out)
        ):
            self.by_name[str(func)] += 1
        return out


@pytest.mark.parametrize("number", range(5))
def test_one_copy_for_each_micro_batch(number: int):
    row = rows()[number]
    with Copies() as copies:
        moved = to_device(row, META, torch.float32)
    assert copies.by_name == {"aten._to_copy.default": 1}
    there = list(host_to_device._tensors(moved))
    assert len(there) > 9 and all(x.device == META for x in there)
    assert [x.shape for x in there] == [x.shape for x in host_to_device._tensors(row)]


@pytest.mark.parametrize("number", range(5))
def test_every_tensor_is_what_it_was(number: int):
    """By way of the staged bytes, whose views begin where their dtype can be read."""
    row = rows()[number]
    before = list(host_to_device._tensors(row))
    dtypes = [torch.float32 if x.is_floating_point() else x.dtype for x in before]
    after = host_to_device._copy_together(before, dtypes, CPU)
    assert len({x.untyped_storage().data_ptr() for x in after}) == 1
    for x, y, dtype in zip(before, after, dtypes, strict=True):
        assert y.dtype == dtype and torch.equal(x.to(dtype), y) and y.data_ptr() % 16 == 0


def test_a_buffer_is_used_once(monkeypatch: pytest.MonkeyPatch):
    """A copy may still be under way when the next micro-batch is staged: it has another buffer."""
    first, second = (to_device(row, META) for row in rows()[:2])
    assert first.input_ids.shape != second.input_ids.shape
    buffers: list[Tensor] = []
    empty = torch.empty

    def kept(*args, **kwargs) -> Tensor:
        buffers.append(empty(*args, **kwargs))
        return buffers[-1]

    monkeypatch.setattr(torch, "empty", kept)
    for row in rows()[:2]:
        to_device(row, META)
    assert len({x.data_ptr() for x in buffers}) == len(buffers) == 2


def test_nothing_is_copied_on_the_host():
    row = collate(random_sequences(GROUPS), share_prompts=True)
    there = to_device(row, CPU, torch.float64)
    for field in fields(row):
        value = getattr(row, field.name)
        assert not isinstance(value, Tensor) or getattr(there, field.name) is value
    assert to_device(row, CPU, torch.float32).advantages.dtype == torch.float32
    assert all(x is y for x, y in zip(host_to_device._tensors(row), host_to_device._tensors(there), strict=True))


def test_memory_that_cannot_be_pinned_is_not_a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch):
    """The driver says "out of memory" for both. The copy is made all the same, from memory as it comes."""
    empty = torch.empty

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
        return empty(*args, **kwargs)

    with fake_cuda() as cuda:
        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.warns(RuntimeWarning, match=r"could not be pinned \(CUDA error: out of memory\), so copies"):
            moved = to_device((torch.arange(3), torch.ones(2)), torch.device("cuda", 0))
    assert [x.shape for x in moved] == [(3,), (2,)] and {x.device.type for x in moved} == {"cuda"}
    assert [c.way for c in cuda.crossings] == ["in"]
