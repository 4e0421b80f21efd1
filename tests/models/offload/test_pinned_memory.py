"""Pinned host memory: as much as is asked for, until it is given back; and what is put there."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from cohort.models import host_memory as pinned_memory
from cohort.models.host_memory import OffloadedWeights, PinnedMemory, PinnedStack, bytes_for

CUDA = torch.device("cuda", 0)


class Cudart:
    """CUDA's runtime, as far as it pins memory."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}  # address -> bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self.status == 0:
            assert not any(a < address + num_bytes and address < a + n for a, n in self.pinned.items())
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    @property
    def num_bytes(self) -> int:
        return sum(self.pinned.values())


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned_memory, "_clear_error", lambda device: None)
    return runtime


def test_it_is_pinned_as_it_is_and_until_nobody_has_it(cudart: Cudart):
    like = [torch.empty(3, 1000, dtype=torch.bfloat16), torch.empty(7, dtype=torch.float64), torch.empty(0, 5)]
    memory = PinnedMemory(bytes_for(like), CUDA)
    assert cudart.num_bytes == bytes_for(like) == 6016 + 64
    tensors = [memory.take(x.shape, x.dtype) for x in like]
    for x, y in zip(like, tensors, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and y.is_contiguous() and not y.any()
    ((start, size),) = cudart.pinned.items()
    assert all(start <= x.data_ptr() and x.data_ptr() + x.nbytes <= start + size for x in tensors[:2])
    del memory, x, y
    last = tensors[1][2:]
    tensors.clear()
    gc.collect()
    assert cudart.pinned
    del last
    gc.collect()
    assert not cudart.pinned


def test_what_cannot_be_pinned_is_used_as_it_is(cudart: Cudart):
    cudart.status = 2
    with pytest.warns(UserWarning, match=r"0\.0 GB of host memory could not be pinned .*error 2"):
        memory = PinnedMemory(64, CUDA)
    assert not cudart.pinned and memory.take([16], torch.float32).sum() == 0


class Owner:
    """Of memory that is taken from a stack."""


def test_a_stack_grows_by_blocks_and_gives_what_is_free_out_again(cudart: Cudart, monkeypatch: pytest.MonkeyPatch):
    """Literal: blocks of 1,024 bytes; 1,500 bytes are in two of them, in pieces."""
    monkeypatch.setattr(pinned_memory, "BLOCK_BYTES", 1024)
    stack, owners = PinnedStack(CUDA), [Owner() for _ in range(3)]
    assert stack.num_bytes == cudart.num_bytes == 0
    first, second = stack.take(1500, owners[0]), stack.take(10, owners[1])
    assert [len(x) for x in (*first, *second)] == [1024, 476, 10] and list(cudart.pinned.values()) == [1024, 1024]
    owners[0] = Owner()  # gone, but under the second
    (third,) = stack.take(400, owners[2])
    assert third.data_ptr() == second[0].data_ptr() + 64 == first[1].data_ptr() + 512 + 64
    assert stack.num_bytes == 2048
    owners[:] = [Owner()]
    again = stack.take(2048, owners[0])
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in (first[0], first[1])]
    assert stack.num_bytes == cudart.num_bytes == 2048
    del stack, first, second, third
    gc.collect()
    assert cudart.num_bytes == 2048
    del again
    gc.collect()
    assert not cudart.pinned


def test_a_parked_model_takes_its_size(cudart: Cudart):
    """Sizes just over a power of two, of which PyTorch's allocator would take twice as much."""
    model = nn.ModuleDict({str(n): nn.Linear(65, 64) for n in range(5)})
    model["tied"] = model["0"]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    own = sum(p.nbytes for p in model.parameters())
    parking: Any = OffloadedWeights(model, CUDA)
    assert own <= cudart.num_bytes < 1.01 * own
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model["tied"].weight is model["0"].weight
    del parking, model
    gc.collect()
    assert not cudart.pinned
