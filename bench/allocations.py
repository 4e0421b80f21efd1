"""How much memory PyTorch has given out, found without knowing what a model is made of.

On a CPU PyTorch's profiler records every allocation and release; on GPUs the caching allocator counts by itself. The
profiler misses what gloo's threads release, so that of several processes on a CPU only what lasts is counted, as the
storages of all tensors that Python has.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "phase: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes that were allocated since counting began."""

    before: int
    peak: int | None  # None: not known
    after: int


class Counted(Protocol):
    """Counts while phases run. A phase that comes several times keeps its last one."""

    @property
    def phases(self) -> Mapping[str, Phase]:
        """By name; to be asked when counting has ended."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the block under a name."""


@contextmanager
def counting(device: torch.device, *, processes: int = 1) -> Iterator[Counted]:
    """Count inside of the block.

    Args:
        device: whose memory.
        processes: that talk to each other.
    """
    gc.collect()  # what is garbage already would be missed when it goes
    if device.type == "cuda":
        yield _OnGpu(device)
    elif processes > 1:
        yield _Lasting()
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield _Recorded(profiler)


class _OnGpu:
    def __init__(self, device: torch.device):
        self.phases: dict[str, Phase] = {}
        self._device = device
        self._began = torch.cuda.memory_allocated(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        peak, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        began = self._began
        self.phases[name] = Phase(before=before - began, peak=peak - began, after=after - began)


class _Lasting:
    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._began = _living_bytes()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = _living_bytes()
        yield
        self.phases[name] = Phase(before=before - self._began, peak=None, after=_living_bytes() - self._began)


class _Recorded:
    def __init__(self, profiler: profile):
        self._profiler = profiler

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with record_function(_MARK + name):
            yield

    @property
    def phases(self) -> dict[str, Phase]:
        """Replay what was recorded."""
        assert self._profiler.profiler is not None, "it was entered"
        events = sorted(
            _flat(self._profiler.profiler.kineto_results.experimental_event_tree()), key=attrgetter("start_time_ns")
        )
        sizes = changes([event for event in events if event.name == "[memory]"])
        found = {}
        for mark in events:
            if not mark.name.startswith(_MARK):
                continue
            before = peak = now = sum(size for at, size in sizes if at < mark.start_time_ns)
            for at, size in sizes:
                if mark.start_time_ns <= at <= mark.end_time_ns:
                    now += size
                    peak = max(peak, now)
            found[mark.name.removeprefix(_MARK)] = Phase(before=before, peak=peak, after=now)
        return found


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def changes(events: Iterable[Any]) -> list[tuple[int, int]]:
    """When how many bytes came or went, of memory that came while these events were recorded.

    PyTorch remembers sizes by address from one recording to the next: it reports the release of what an earlier one
    saw, or of anything that has come to lie there since. A release in a thread that is not recorded shows when the
    address is given out again.
    """
    found, living = [], dict[int, int]()
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        gone = living.pop(address, 0)
        if size > 0:
            living[address] = size
        found.append((event.start_time_ns, max(size, 0) - gone))
    return found


def _living_bytes() -> int:
    """Of the storages of all tensors; tensors that are made of others have none of their own."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [x for x in gc.get_objects() if type(x) in plain and x.device.type == "cpu"]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
