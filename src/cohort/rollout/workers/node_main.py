"""The process that runs the rollout workers of a node other than rank 0's: one for each connection that knows the key.

It passes on what the worker and rank 0 say to each other, and reads none of it. It is a child of the first rank of its
node, and the workers are its children: a guard ends each with its parent.
"""

import socket
import subprocess
import threading
import time
from contextlib import suppress

from cohort.processes.child import CLOSE_TIMEOUT_S, Child, ChildFailed, Peer, serve
from cohort.rollout.workers.nodes import COMMAND, CONNECT_TIMEOUT_S, ENDED, MAX_BYTES, REFUSALS

_PAUSE_S = 0.1  # before the next connection is accepted, if one could not be


def main() -> None:
    """Run workers until the parent hangs up."""
    serve(listen)


def listen(key: bytes) -> int:
    """Run a worker for each connection from now on. Returns the port."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    threading.Thread(target=_accept, args=(listener, key), daemon=True).start()
    return int(listener.getsockname()[1])


def _accept(listener: socket.socket, key: bytes) -> None:
    while True:
        try:
            threading.Thread(target=_run_worker, args=(Peer(listener.accept()[0]), key), daemon=True).start()
        except (OSError, RuntimeError):  # the other end has gone, or there are no descriptors or threads for it
            time.sleep(_PAUSE_S)


def _run_worker(rank0: Peer, key: bytes) -> None:
    """Run a worker until rank 0 hangs up, and then until it has closed its environments."""
    try:
        rank0.authenticate(key, CONNECT_TIMEOUT_S, asks_first=True)
        child = Child(COMMAND)
    except REFUSALS:
        rank0.kill()
        return
    answering = threading.Thread(target=_pass_answers_on, args=(child, rank0), daemon=True)
    answering.start()
    with suppress(ChildFailed):
        while True:
            child.send_bytes(rank0.receive(bytes, max_bytes=MAX_BYTES))
    child.hang_up()
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(2 * CLOSE_TIMEOUT_S)
    child.kill()
    answering.join()
    rank0.kill()


def _pass_answers_on(child: Child, rank0: Peer) -> None:
    """Pass on what a worker sends, and how it ended."""
    try:
        while True:
            rank0.send_bytes(child.receive(bytes, max_bytes=MAX_BYTES))
    except ChildFailed as failed:
        with suppress(ChildFailed):  # rank 0 is gone
            rank0.send_bytes(ENDED + str(failed).encode())
