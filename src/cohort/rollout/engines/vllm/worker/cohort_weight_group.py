"""The process group of a trainer and one vLLM server's workers, made and tried in the same way at both ends.

A server imports this from its folder, so it needs torch alone. What a group does may never return, when the other end
is gone or hangs. It is done in threads that nothing waits for longer than it wants to, not even the end of the process.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_ABORT_TIMEOUT_S = 10.0
_TRIED_NUMBERS = 1024


class _NoWatchdog:
    """Holders between `begin` and `end` make NCCL groups without a watchdog.

    The watchdog ends its process when a collective fails or takes too long, which is right among training ranks. Here
    it would end the trainer for the failure of a server. With this variable a group starts none, its `wait` waits for
    the GPU itself and raises, and the deadlines are those of whoever waits for the thread.

    There is no option of a single group for this: its constructor reads the variable, and `ProcessGroupNCCL.Options`
    has a timeout alone. So the variable is set for the whole process, from `WeightGroup.connect` until the group is
    made or given up, even if making it hangs. No other NCCL group is made meanwhile: the training ranks, and vLLM's
    workers, have theirs before they meet here.
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
        """Put it back as it was, with the last holder; nothing if this one is none."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.remove(holder)
            if not self._holders:
                del os.environ[self.variable]
                if self._before is not None:
                    os.environ[self.variable] = self._before


_no_watchdog = _NoWatchdog()


class WeightGroup:
    """Rank 0 is the trainer, which sends. The others are the workers of one server."""

    def __init__(
        self,
        way: Literal["gloo", "nccl"],
        store: Any,
        *,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        timeout_s: float,
    ):
        """Nothing is connected yet.

        Args:
            way: through host memory (gloo), or from GPU to GPU (nccl).
            store: where the processes meet.
            rank: of this process.
            size: number of processes.
            device: of the tensors: the CPU with gloo, with nccl this process's GPU with its index.
            host: this machine's address on the network that leads to the others.
            timeout_s: when a thread that nobody waits for any more gives up. Whoever waits has a deadline of its own.
        """
        assert way == "gloo" or device.index is not None, "a thread does not know which GPU is this process's"
        self.device = device
        self._way = way
        self._store = store
        self._rank = rank
        self._size = size
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._given_up = False

    def connect(self) -> "Future[None]":
        """Make the group, and try it with numbers whose sum every process knows.

        NCCL makes its communicator in the first collective: here, and not in the midst of the weights.
        """
        if self._way == "nccl":
            _no_watchdog.begin(self)
        return in_thread(self._connect)

    def broadcast(self, tensor: Tensor) -> "Future[None]":
        """Send rank 0's contiguous tensor into those of the others; the future is done when it is there."""
        # as bytes: not every group knows every dtype
        return in_thread(self._broadcast, tensor.view(-1).view(torch.uint8), _stream_of(tensor))

    def abort(self) -> None:
        """End what is under way and leave, which the others see. Never fails, and never takes longer than seconds."""
        self._given_up = True
        _no_watchdog.end(self)  # where making it hangs
        group, self._group = self._group, None
        if group is not None and self._way == "nccl":  # a group of gloo ends with its last reference
            with suppress(Exception):
                in_thread(self._abort, group).result(_ABORT_TIMEOUT_S)

    def _abort(self, group: Any) -> None:
        with _on(self.device, None):
            group.abort()

    def _connect(self) -> None:
        with _on(self.device, None):
            try:
                self._group = group = self._make()
            finally:
                _no_watchdog.end(self)
            if self._given_up:  # before there was anything to abort
                self.abort()
                return
            numbers = torch.full((_TRIED_NUMBERS,), self._rank + 1, dtype=torch.int32, device=self.device)
            group.allreduce(numbers).wait()
            expected = self._size * (self._size + 1) // 2
            if not bool((numbers == expected).all()):
                raise RuntimeError(f"{self._way} computes wrong sums between trainer and server")

    def _make(self) -> Any:
        options: Any
        if self._way == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            return dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)

    def _broadcast(self, data: Tensor, stream: Any) -> None:
        with _on(self.device, stream):
            group = self._group
            if group is None:
                raise RuntimeError("the group was left")
            group.broadcast(data, 0).wait()


def in_thread(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Call in a thread that the end of this process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def result_within(future: "Future[T]", timeout_s: float, what: str) -> T:
    """The result of what is done in a thread.

    Raises:
        RuntimeError: it is not there in time.
    """
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        if future.done():
            raise
        raise RuntimeError(f"{what} took longer than {timeout_s:g} s") from None


def describe_device(device: torch.device) -> dict[str, str | None]:
    """What the other end has to know of a device: its GPU and the version of NCCL; None on a CPU."""
    if device.type != "cuda":
        return {"gpu": None, "nccl": None}
    return {"gpu": gpu_uuid(device), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def gpu_uuid(device: torch.device) -> str:
    """Of a GPU: processes number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _stream_of(tensor: Tensor) -> Any:
    """The stream that makes the tensor: one of this thread's, which another thread has to ask for."""
    return torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None


def _on(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Compute on a device in a thread, which begins with the first GPU otherwise."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(stream))
    return stack
