"""Rollout workers on other nodes, as rank 0 starts them: each is a connection to a process there (`node_main.py`)."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from typing import Any

import psutil

from cohort.errors import TrainingError
from cohort.processes.child import Child, ChildFailed, Peer, child_command

COMMAND = child_command("cohort.rollout.workers.worker_main")
MAX_BYTES = 1 << 30  # of a message with a group
ENDED = b"\0"  # begins the message that says how a worker ended; others begin with JSON
# of an end that does not know the key; Python asserts what a challenge begins with
REFUSALS = (OSError, EOFError, ValueError, AssertionError, AuthenticationError)
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of every node for itself
CONNECT_TIMEOUT_S = 20.0


class RemoteChild(Peer):
    """A worker on another node, as a `Child` is one on this node."""

    def receive(self, read: Callable[[bytes], Any], *, max_bytes: int) -> Any:  # type: ignore[override]
        """Wait for a message and return it, as `Peer.receive` does."""
        content = super().receive(bytes, max_bytes=max_bytes)
        if content.startswith(ENDED):
            raise ChildFailed(content.removeprefix(ENDED).decode(errors="replace"))
        return read(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Another node with a process that runs workers for whoever knows the key."""

    name: str  # in messages
    names: frozenset[str]  # host names and addresses
    hosts: tuple[str, ...]  # addresses at which rank 0 may reach it
    port: int
    key: bytes = field(repr=False)

    def start_worker(self) -> RemoteChild:
        """Start a worker, which lasts as long as the connection.

        Raises:
            TrainingError: the process there does not answer.
        """
        problems = []
        for host in self.hosts:
            try:
                child = RemoteChild(socket.create_connection((host, self.port), timeout=CONNECT_TIMEOUT_S))
                child.authenticate(self.key, CONNECT_TIMEOUT_S, asks_first=False)
            except REFUSALS as error:
                problems.append(f"{host}:{self.port}: {_problem(error)}")
            else:
                return child
        raise TrainingError(
            f"rank 0 cannot start a rollout worker on {self.name} ({'; '.join(problems)}); let nodes connect to each "
            f"other, or use rollout.workers: 1"
        )


def _problem(error: BaseException) -> str:
    """Say why there is no connection."""
    if isinstance(error, BlockingIOError | TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    return str(error) or "it does not know the key"


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """Where one worker after the other runs."""

    index: int  # on its node
    names: frozenset[str]  # of its node
    node: Node | None = None  # None: that of this process
    num_losses: int = 0  # workers that ended since a group was finished
    is_lost: bool = False  # no more are started

    def start(self) -> Child | RemoteChild:
        """Start a worker. Raises as `Node.start_worker` does, or an `OSError` on this node."""
        return Child(COMMAND) if self.node is None else self.node.start_worker()

    def __str__(self) -> str:
        return "" if self.node is None else f" on {self.node.name}"


def host_workers(key: bytes, *, timeout_s: float) -> tuple[Child, Node]:
    """Start the process that runs the workers of this node, which end with it, and return how rank 0 reaches it.

    Raises:
        TrainingError: it does not start. The message names the node.
    """
    name, host = socket.gethostname(), Child(child_command("cohort.rollout.workers.node_main"))
    from cohort.rollout.engines.servers.server_side.cohort_weight_group import own_address  # imports torch

    try:
        own = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)
        port = host.call(key, timeout_s)
    except (OSError, ChildFailed) as error:
        raise TrainingError(f"rollout.workers: {name} cannot run workers: {error}") from error
    return host, Node(name=name, names=node_names(), hosts=(own, name), port=port, key=key)


def node_names() -> frozenset[str]:
    """Return the host names, in lower case, and addresses of this node, except those that every node has."""
    name = socket.gethostname().lower()
    every = [address.address for interface in psutil.net_if_addrs().values() for address in interface]
    return frozenset({name, name.partition(".")[0], *every}.difference(LOOPBACK))
