"""Process group of the trainer and one server's workers, used on both sides.

The server imports this file from its folder, so it depends on torch only. A collective may never return if the other
side is gone or hangs. Collectives therefore run in daemon threads, and callers wait for them with timeouts.
"""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_ABORT_TIMEOUT_S = 10.0
_TEST_NUMEL = 1024


class _NoWatchdog:
    """Disables the watchdog of NCCL groups that are created between `begin` and `end`.

    The watchdog kills its process when a collective fails or takes too long. That is right for training ranks, but here
    it would kill the trainer when a server fails. With this variable a group has no watchdog, its `wait` blocks until
    the GPU is done and raises, and callers of the thread set the timeouts.

    A single group has no option for this: its constructor reads the variable, and `ProcessGroupNCCL.Options` only has a
    timeout. So the variable is set for the whole process, from `WeightGroup.connect` until the group is created or
    aborted, even if creation hangs. No other NCCL group is created meanwhile: training ranks and servers' workers
    create theirs before the rendezvous.
    """

    variable = "TORCH_NCCL_BLOCKING_WAIT"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._before: str | None = None

    def begin(self, holder: object) -> None:
        """Set the variable."""
        with self._lock:
            if not self._holders:
                self._before = os.environ.get(self.variable)
                os.environ[self.variable] = "1"
            self._holders.add(holder)

    def end(self, holder: object) -> None:
        """Restore the variable after the last holder. Does nothing for an unknown holder."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.remove(holder)
            if not self._holders:
                del os.environ[self.variable]
                if self._before is not None:
                    os.environ[self.variable] = self._before


_no_watchdog = _NoWatchdog()


@dataclass(eq=False)
class WeightGroup:
    """A process group in which rank 0, the trainer, broadcasts to the workers of one server."""

    transport: str  # gloo (through host memory) or nccl (from GPU to GPU)
    store: Any  # for the rendezvous
    _: KW_ONLY
    rank: int  # of this process
    size: int  # number of processes
    device: torch.device  # of the tensors: the CPU for gloo, this process's GPU with its index for nccl
    host: str  # this machine's address on the network that reaches the others
    timeout_s: float  # after which an abandoned thread ends; callers have their own timeouts

    def __post_init__(self) -> None:
        """Connect nothing yet."""
        assert self.transport == "gloo" or self.device.index is not None, "threads need the index of this process's GPU"
        self._group: Any = None
        self._aborted = False

    def connect(self) -> "Future[None]":
        """Create the group and test it with an all-reduce whose result is known.

        NCCL creates its communicator in the first collective: here, and not during a weight update.
        """
        if self.transport == "nccl":
            _no_watchdog.begin(self)
        return in_thread(self._connect)

    def broadcast(self, tensor: Tensor) -> "Future[None]":
        """Broadcast rank 0's contiguous tensor into those of the others."""
        # as bytes: not every backend supports every dtype
        return in_thread(self._broadcast, tensor.view(-1).view(torch.uint8), _stream_of(tensor))

    def abort(self) -> None:
        """Abort pending collectives and leave; the others notice. Never fails and returns within seconds."""
        self._aborted = True
        _no_watchdog.end(self)  # if its creation hangs
        group, self._group = self._group, None
        if group is not None and self.transport == "nccl":  # a gloo group ends with its last reference
            with suppress(Exception):
                in_thread(self._abort, group).result(_ABORT_TIMEOUT_S)

    def _abort(self, group: Any) -> None:
        with _use_device(self.device, None):
            group.abort()

    def _connect(self) -> None:
        with _use_device(self.device, None):
            try:
                self._group = group = self._make()
            finally:
                _no_watchdog.end(self)
            if self._aborted:  # before the group existed
                self.abort()
                return
            numbers = torch.full((_TEST_NUMEL,), self.rank + 1, dtype=torch.int32, device=self.device)
            group.allreduce(numbers).wait()
            expected = self.size * (self.size + 1) // 2
            if not bool((numbers == expected).all()):
                raise RuntimeError(f"{self.transport} returns wrong sums between trainer and server")

    def _make(self) -> Any:
        options: Any
        if self.transport == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=self.timeout_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            return dist.ProcessGroupGloo(self.store, self.rank, self.size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupNCCL(self.store, self.rank, self.size, options)

    def _broadcast(self, data: Tensor, stream: Any) -> None:
        with _use_device(self.device, stream):
            group = self._group
            if group is None:
                raise RuntimeError("the process group was aborted")
            group.broadcast(data, 0).wait()


def in_thread(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Run a function in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def result_within(future: "Future[T]", timeout_s: float, what: str) -> T:
    """Return the result of a future.

    Raises:
        RuntimeError: it was not done in time.
    """
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        if future.done():
            raise
        raise RuntimeError(f"{what} took longer than {timeout_s:g} s") from None


def describe_device(device: torch.device) -> dict[str, str | None]:
    """Return the GPU's UUID and the NCCL version, both None on CPU."""
    if device.type != "cuda":
        return {"gpu": None, "nccl": None}
    return {"gpu": gpu_uuid(device), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def gpu_uuid(device: torch.device) -> str:
    """Identify a GPU across processes, which number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def own_address(host: str, port: int, timeout_s: float) -> str:
    """Return this machine's address on the network that reaches another one, where a server listens."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        return str(connection.getsockname()[0])


def _stream_of(tensor: Tensor) -> Any:
    """Return this thread's current stream, which produces the tensor; other threads have their own."""
    return torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None


def _use_device(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Use a device and stream in a new thread, which would otherwise use the first GPU."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(stream))
    return stack
