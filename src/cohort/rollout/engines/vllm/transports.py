"""The ways of tensors to the workers of one vLLM server: a process group, or memory that the ranks lend them."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from time import monotonic
from typing import Any, Literal, Protocol

from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.cuda_ipc import Portion, portions
from cohort.rollout.engines.servers.requests import ServerError
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.worker.cohort_weight_group import WeightGroup, in_thread, result_within

Way = Literal["gloo", "nccl", "ipc"]
_REASON_TIMEOUT_S = 2.0


class WeightTransfer(Protocol):
    """A way of tensors to the workers of one server. One thread calls; every failure is a `RuntimeError`."""

    way: Way

    def prepare(self, handles: Mapping[str, Any]) -> None:
        """Try what can be tried before the server is disturbed.

        Args:
            handles: by GPU, how the workers on it open what its rank lends; none where the ranks lend nothing.
        """
        ...

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """The workers know what will come; have them begin to take it."""
        ...

    def post(self, name: str, tensor: Tensor) -> None:
        """Begin to send the next tensor, of the declared dtype; `settle` follows before it changes."""
        ...

    def settle(self) -> None:
        """Wait until what was posted may change."""
        ...

    def finish(self) -> None:
        """Wait until the workers have everything."""
        ...

    def close(self) -> None:
        """Give up what is under way, which the workers see. Never fails, and never takes longer than seconds."""
        ...


class GroupTransfer:
    """Broadcasts in a process group with the server's workers, which receive in one long call."""

    def __init__(self, way: Literal["gloo", "nccl"], group: WeightGroup, api: VllmApi, *, timeout_s: float):
        """The group is connected; `timeout_s` is the longest wait for one tensor."""
        self.way: Way = way
        self._group = group
        # the call lasts as long as the stream does, until `close` at the latest; a server that does not take the next
        # tensor is seen by that
        self._api = VllmApi(api.url, timeout_s=None)
        self._timeout_s = timeout_s
        self._received: Future[None] | None = None
        self._sent: Future[None] | None = None

    def prepare(self, handles: Mapping[str, Any]) -> None:
        """It was tried when it was connected."""

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Have the workers receive."""
        self._received = in_thread(self._api.update_weights, {"step": "receive"})

    def post(self, name: str, tensor: Tensor) -> None:
        """Begin to broadcast."""
        self._sent = self._group.broadcast(tensor.to(self._group.device).contiguous())

    def settle(self) -> None:
        """Until the broadcast is through, the server's call has failed, or time is up."""
        sent, self._sent = self._sent, None
        if sent is not None:
            assert self._received is not None, "begin comes first"
            wait_for_both(sent, self._received, self._timeout_s, self._api.url)

    def finish(self) -> None:
        """Until the server's call has ended well."""
        assert self._received is not None, "begin comes first"
        result_within(self._received, self._timeout_s, f"{self._api.url}: receiving the last weights")

    def close(self) -> None:
        """Leave the group, and end the call of a server that does not answer."""
        self._group.abort()
        self._api.close()


class LentTransfer:
    """Tells the workers where in the memory of the rank on their GPU the tensors are. Never run on a GPU yet."""

    way: Way = "ipc"

    def __init__(self, api: VllmApi):
        """Calls have the deadline of `api`."""
        self._api = api
        self._portions: deque[Portion] = deque()
        self._posted: Portion = {}
        self._read: Future[None] | None = None

    def prepare(self, handles: Mapping[str, Any]) -> None:
        """Have the workers open what is lent to them, and compare its first bytes."""
        self._api.init_weight_transfer({"lent": dict(handles)})

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """The ranks lay the tensors out in the same way."""
        self._portions = deque(portions(specs))

    def post(self, name: str, tensor: Tensor) -> None:
        """Where it is, is known; the workers are told of a whole portion."""
        portion = self._portions[0]
        self._posted[name] = portion[name]
        if len(self._posted) == len(portion):
            lent = list(self._portions.popleft().items())
            self._posted = {}
            self._read = in_thread(self._api.update_weights, {"step": "load", "lent": lent})

    def settle(self) -> None:
        """Until the workers have read the portion."""
        read, self._read = self._read, None
        if read is not None:
            read.result()

    def finish(self) -> None:
        """`settle` has waited for all of it."""

    def close(self) -> None:
        """Nothing is under way but calls, which end by themselves."""


def wait_for_both(own: "Future[Any]", servers: "Future[None]", timeout_s: float, url: str) -> None:
    """Wait for this end of something that the server's call is the other end of.

    Raises:
        RuntimeError: either has failed.
        ServerError: the server does not do its part in time.
    """
    deadline = monotonic() + timeout_s
    wait((own, servers), timeout_s, FIRST_COMPLETED)
    if not own.done() and servers.done():
        servers.result()
        wait((own,), max(0.0, deadline - monotonic()))  # the other end is through, so this one is about to be
    if not own.done():
        raise ServerError(f"{url}: the server's workers did not answer within {timeout_s:g} s")
    if own.exception():
        with suppress(FutureTimeoutError):
            servers.result(_REASON_TIMEOUT_S)  # why the server has left, if it says so
    own.result()
