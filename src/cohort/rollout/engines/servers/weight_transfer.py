"""Transports of weights to a server's workers: process group broadcasts or CUDA IPC."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic
from typing import Any, Literal, Protocol

from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.cuda_ipc import Bucket, IpcHandle, make_buckets
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.server_side.cohort_weight_group import WeightGroup, in_thread, result_within

Transport = Literal["gloo", "nccl", "ipc"]
_REASON_TIMEOUT_S = 2.0


class WeightTransfer(Protocol):
    """Sends tensors to the workers of one server. Not thread-safe; every failure is a `RuntimeError`."""

    transport: Transport

    def prepare(self, handles: Mapping[str, IpcHandle]) -> None:
        """Set up and test the connection before the server pauses.

        Args:
            handles: CUDA IPC handles by GPU; empty if the ranks share no memory.
        """
        ...

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Have the workers start to receive these tensors, which were declared before."""
        ...

    def post(self, name: str, tensor: Tensor) -> None:
        """Start sending the next tensor, in the declared dtype. It must not change until `flush`."""
        ...

    def flush(self) -> None:
        """Wait until posted tensors may change."""
        ...

    def finish(self) -> None:
        """Wait until the workers have all tensors."""
        ...

    def close(self) -> None:
        """Abort pending transfers; the workers notice. Never fails and returns within seconds."""
        ...


@dataclass(slots=True, eq=False)
class GroupTransfer:
    """Broadcasts in a process group (gloo or NCCL) with the server's workers, which receive in one HTTP call."""

    transport: Transport
    group: WeightGroup  # connects this process with the workers
    _: KW_ONLY
    url: str  # address of the server, for messages
    # has the workers receive, and returns once they have all tensors; without a timeout, since a hung server is noticed
    # at its next tensor
    receive: Callable[[], None]
    hang_up: Callable[[], None]  # ends `receive`, which runs in another thread
    timeout_s: float  # maximum time per tensor
    received: "Future[None] | None" = field(default=None, init=False)
    _sent: "Future[None] | None" = field(default=None, init=False)

    def prepare(self, handles: Mapping[str, IpcHandle]) -> None:
        """Do nothing: the group was tested when it was connected."""

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Have the workers start to receive."""
        self.received = in_thread(self.receive)

    def post(self, name: str, tensor: Tensor) -> None:
        """Start a broadcast."""
        self._sent = self.group.broadcast(tensor.to(self.group.device).contiguous())

    def flush(self) -> None:
        """Wait for the broadcast, a failure of the server's call, or the timeout."""
        sent, self._sent = self._sent, None
        if sent is not None:
            assert self.received is not None, "begin comes first"
            wait_for_both(sent, self.received, self.timeout_s, self.url)

    def finish(self) -> None:
        """Wait for the server's call to succeed."""
        assert self.received is not None, "begin comes first"
        result_within(self.received, self.timeout_s, f"{self.url}: receiving the last weights")

    def close(self) -> None:
        """Leave the group and end the HTTP call."""
        self.group.abort()
        self.hang_up()


@dataclass(slots=True, eq=False, kw_only=True)
class IpcTransfer:
    """Has the workers read tensors from the memory of the rank on their GPU (CUDA IPC). Not tested on a GPU yet."""

    open_buffers: Callable[[Mapping[str, IpcHandle]], None]  # has the workers open the ranks' buffers, by GPU
    load: Callable[
        [list[tuple[str, int]]], None
    ]  # has the workers load tensors, given names and offsets in the buffers
    transport: Transport = field(default="ipc", init=False)
    _buckets: deque[Bucket] = field(default_factory=deque, init=False)
    _posted: Bucket = field(default_factory=dict, init=False)
    _read: "Future[None] | None" = field(default=None, init=False)

    def prepare(self, handles: Mapping[str, IpcHandle]) -> None:
        """Have the workers open the shared buffers and compare their first bytes."""
        self.open_buffers(handles)

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Compute the buffer's layout, which is the same on all ranks."""
        self._buckets = deque(make_buckets(specs))

    def post(self, name: str, tensor: Tensor) -> None:
        """Have the workers load a bucket once all of its tensors are there."""
        bucket = self._buckets[0]
        self._posted[name] = bucket[name]
        if len(self._posted) == len(bucket):
            offsets = list(self._buckets.popleft().items())
            self._posted = {}
            self._read = in_thread(self.load, offsets)

    def flush(self) -> None:
        """Wait until the workers have read the bucket."""
        read, self._read = self._read, None
        if read is not None:
            read.result()

    def finish(self) -> None:
        """Do nothing: `flush` has waited for everything."""

    def close(self) -> None:
        """Do nothing: pending calls have timeouts."""


def wait_for_both(own: "Future[Any]", servers: "Future[None]", timeout_s: float, url: str) -> None:
    """Wait for a transfer together with the server's call that takes part in it.

    Raises:
        RuntimeError: either failed.
        ServerError: the server did not finish in time.
    """
    deadline = monotonic() + timeout_s
    wait((own, servers), timeout_s, FIRST_COMPLETED)
    if not own.done() and servers.done():
        servers.result()
        wait((own,), max(0.0, deadline - monotonic()))  # the server is done, so this side soon is too
    if not own.done():
        raise ServerError(f"{url}: the server's workers did not answer within {timeout_s:g} s")
    if own.exception():
        with suppress(FutureTimeoutError):
            servers.result(_REASON_TIMEOUT_S)  # the server's own error says more
    own.result()


def choose_transport(
    trainer: Mapping[str, str | None], workers: Sequence[Mapping[str, str | None]], *, ipc_gpus: Collection[str]
) -> tuple[Transport, str]:
    """Choose the fastest transport that works between these GPUs.

    Args:
        trainer: GPU and NCCL version of rank 0, from `describe_device`.
        workers: the same of the server's workers.
        ipc_gpus: GPUs whose ranks can share memory with this server.

    Returns:
        the transport, and a note for the user ("" if none).
    """
    gpus = {worker["gpu"] for worker in workers}
    if trainer["gpu"] is None or None in gpus:
        return "gloo", ""
    if gpus <= set(ipc_gpus):
        return "ipc", ""
    if trainer["gpu"] in gpus:
        return "gloo", "NCCL does not support two processes on one GPU: weights go through host memory"
    others = sorted({str(worker["nccl"]) for worker in workers} - {str(trainer["nccl"])})
    if others:
        return "gloo", (
            f"NCCL versions differ (trainer: {trainer['nccl']}, server: {', '.join(others)}): weights go through host "
            f"memory, which is slower; install the same torch in both environments to avoid this"
        )
    return "nccl", ""
