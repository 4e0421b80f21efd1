"""Channels through which weights reach a run's servers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

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


# An engine's kind of channel. Covariant, since it shows in no method of `Channels` but the constructor.
C = TypeVar("C", bound=Channel, covariant=True)


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
