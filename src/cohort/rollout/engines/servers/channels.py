"""Channels through which weights reach a run's servers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import methodcaller
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.cuda_ipc import IpcHandle
from cohort.rollout.engines.servers.handles import RunningServer, ServerError


class Channel(Protocol):
    """Sends weights to one server."""

    def sleep(self) -> None:
        """Have the server free its GPU memory, weights included, until it receives weights again.

        Raises:
            ServerError: the server did not go to sleep.
        """
        ...

    def close(self) -> None:
        """Release resources. The server may be gone."""
        ...


class StreamChannel(Channel, Protocol):
    """Sends an update tensor by tensor. Every failure is a `ServerError` and aborts the update."""

    def begin(self, specs: Sequence[TensorSpec], handles: Mapping[str, IpcHandle] | None = None) -> None:
        """Begin an update. The server's requests are paused until `finish` or `abort`.

        Args:
            specs: the tensors that will be sent, in order.
            handles: CUDA IPC handles of the ranks' buffers, by GPU.
        """
        ...

    def post(self, name: str, tensor: Tensor) -> None:
        """Start sending the next tensor, without blocking. Call `flush` before the next one."""
        ...

    def flush(self) -> None:
        """Wait until the posted tensor has arrived."""
        ...

    def finish(self, version: int) -> None:
        """Have the server sample with the weights, and label tokens with their policy version."""
        ...

    def abort(self) -> None:
        """Abort the update, if one is in progress. Never fails."""
        ...


# An engine's kind of channel. Covariant, since it shows in no method of `Channels` but the constructor.
C = TypeVar("C", bound=Channel, covariant=True)
S = TypeVar("S", bound=StreamChannel)


class Channels(Generic[C]):
    """One channel per start of a server, opened when it is first needed. For the training thread."""

    def __init__(
        self,
        connect: Callable[[str], C],
        publish: Callable[[Sequence[C], int], Mapping[C, ServerError]],
    ):
        """Create the channels without connecting.

        Args:
            connect: opens a channel to the server at an address; may raise `ServerError`.
            publish: sends the current weights over channels and labels them with a policy version; returns the errors
                of those that failed.
        """
        self._connect = connect
        self._publish = publish
        self._channels: dict[tuple[int, int], C] = {}  # by server index and start number

    def open(self, server: RunningServer) -> None:
        """Connect to this start of the server, unless it is connected.

        Raises:
            ServerError: it does not answer.
        """
        self._channel(server)

    def publish(self, servers: Sequence[RunningServer], version: int) -> dict[RunningServer, ServerError]:
        """Send the current weights to servers that are connected, and return the errors of those that failed."""
        channels = {server: self._channel(server) for server in servers}
        failures = self._publish(list(channels.values()), version) if channels else {}
        return {server: failures[channel] for server, channel in channels.items() if channel in failures}

    def sleep(self, server: RunningServer) -> None:
        """Have a server sleep until it receives weights.

        Raises:
            ServerError: it did not go to sleep.
        """
        self._channel(server).sleep()

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _channel(self, server: RunningServer) -> C:
        started = (server.index, server.num_starts)
        for other in [key for key in self._channels if key[0] == server.index and key != started]:
            self._channels.pop(other).close()
        if started not in self._channels:
            self._channels[started] = self._connect(server.url)
        return self._channels[started]


def send_to_servers(
    channels: Sequence[S],
    weights: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    version: int,
    handles: Mapping[str, IpcHandle] | None = None,
) -> dict[S, ServerError]:
    """Send one stream of weights to several servers simultaneously.

    The stream is consumed to its end even if servers fail: producing it may be a collective of the training ranks.

    Args:
        channels: one per server.
        weights: names and full (unsharded) tensors.
        specs: all tensors, in the order of `weights`.
        version: policy version of the weights.
        handles: CUDA IPC handles of the ranks' buffers, by GPU; None if they share no memory.

    Returns:
        Errors by channel; all other servers have the new weights.
    """
    failed: dict[S, ServerError] = {}

    def call_all(channels: Sequence[S], call: Callable[[S], None]) -> list[S]:
        calls = {channel: threads.submit(call, channel) for channel in channels}
        wait(calls.values())
        return _call_each(channels, lambda channel: calls[channel].result(), failed)

    # in parallel, so that several hung servers cost one timeout
    with ThreadPoolExecutor(max(1, len(channels))) as threads:
        try:
            live = call_all(channels, methodcaller("begin", specs, handles))
            for name, tensor in weights:
                # in this thread, whose CUDA stream produces the tensor; does not block
                live = _call_each(live, methodcaller("post", name, tensor), failed)
                live = call_all(live, methodcaller("flush"))
            call_all(live, methodcaller("finish", version))
        except BaseException:
            call_all(channels, methodcaller("abort"))  # those that have begun and not finished
            raise
    return failed


def _call_each(channels: Sequence[S], call: Callable[[S], None], failed: dict[S, ServerError]) -> list[S]:
    """Call each channel and return those that succeeded; add the others to `failed`."""
    succeeded = []
    for channel in channels:
        try:
            call(channel)
            succeeded.append(channel)
        except ServerError as error:
            failed[channel] = error
    return succeeded
