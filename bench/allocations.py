"""What PyTorch's allocator gives and takes back, counted as it does so: nothing here knows what a model is made of.

On CPUs every allocation and release is recorded by PyTorch's profiler; on GPUs the caching allocator counts by itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "phase: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes that were allocated since counting began."""

    before: int
    peak: int
    after: int


class Allocations:
    """Counts while it is entered; `phases` are there when it is left.

    A phase that comes several times keeps its last one.
    """

    phases: Mapping[str, Phase]

    def __init__(self, device: torch.device):
        """Of that device. On a CPU everything is recorded, which takes memory and time itself."""
        self._device = device
        self._profiler = (
            None
            if device.type == "cuda"
            else profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        )
        self._began = 0
        self._on_gpu: dict[str, Phase] = {}

    def __enter__(self) -> Self:
        if self._profiler is None:
            self._began = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is None:
            self.phases = self._on_gpu
            return
        self._profiler.__exit__(kind, error, trace)
        if error is None:
            self.phases = _phases(self._profiler)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block under a name."""
        if self._profiler is not None:
            with record_function(_MARK + name):
                yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        peak, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        began = self._began
        self._on_gpu[name] = Phase(before=before - began, peak=peak - began, after=after - began)


def _phases(profiler: profile) -> dict[str, Phase]:
    """Replays what was recorded."""
    assert profiler.profiler is not None, "it was entered"
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    marks = [
        (e.name().removeprefix(_MARK), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in events
        if e.name().startswith(_MARK)
    ]
    found = {}
    for name, begin, end in sorted(marks, key=lambda mark: mark[1]):
        before = peak = sum(size for at, size in changes if at < begin)
        now = before
        for at, size in changes:
            if begin <= at <= end:
                now += size
                peak = max(peak, now)
        found[name] = Phase(before=before, peak=peak, after=now)
    return found
