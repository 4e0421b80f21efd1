"""How a person gets to the page: beside a run, the printed address, the SSH tunnel, the browser."""

import getpass
import html
import os
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from cohort_view.server.serve import ViewServer, lower_priority


def describe_address(address: str, environment: Mapping[str, str]) -> str:
    """Return the lines to print: the address and, over SSH, the command that brings it to the user's machine."""
    port = urlsplit(address).port
    if not is_remote(environment) or port is None:
        return f"page: {address}"
    return f"page: {address}\non your own machine, first: {tunnel_command(port, environment)}"


def tunnel_command(port: int, environment: Mapping[str, str]) -> str:
    """Return the SSH command that forwards the page's port.

    SSH_CONNECTION is "client-address client-port server-address server-port".
    """
    connection = environment.get("SSH_CONNECTION", "").split()
    ssh_port = f"-p {connection[3]} " if len(connection) == 4 and connection[3] != "22" else ""
    with suppress(OSError, KeyError):  # no name for this user
        return f"ssh {ssh_port}-N -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"
    return f"ssh {ssh_port}-N -L {port}:127.0.0.1:{port} {socket.gethostname()}"


def is_remote(environment: Mapping[str, str]) -> bool:
    """Whether this terminal is on another machine than the user."""
    return "SSH_CONNECTION" in environment or "SSH_TTY" in environment


def opens_by_default() -> bool:
    """Whether to open a browser unasked: in a terminal on the user's own machine, with a display."""
    has_display = sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    return sys.stdout is not None and sys.stdout.isatty() and has_display and not is_remote(os.environ)


def open_browser(address: str) -> Path | None:
    """Open the page through a file that only this user reads, as other users see the arguments of commands.

    Returns the file to delete at the end; None if there is no browser.
    """
    descriptor, name = tempfile.mkstemp(prefix="cohort-view-", suffix=".html")  # mode 0600
    target = html.escape(address)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={target}"><a href="{target}">page</a>')
    opened = False
    with suppress(webbrowser.Error, OSError):
        opened = webbrowser.open(Path(name).as_uri())
    if opened:
        return Path(name)
    os.unlink(name)
    return None


GRACE_S = 60.0  # after the run's process has ended and the last tab was closed
LONGEST_S = 6 * 3600.0  # after the run's process has ended, even if a tab is still open
_TICK_S = 2.0


def serve_beside(folder: Path, parent: int) -> None:
    """Serve the page of a run until it has ended and nobody looks any more. Print the address, then close stdout.

    Args:
        folder: the run's folder.
        parent: process id of the run, which started this process.
    """
    lower_priority()
    try:
        server = ViewServer([folder])
    except (OSError, ValueError) as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    server.stop_on_signals()
    print(describe_address(server.address, os.environ), flush=True)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # close the pipe
    threading.Thread(target=_stop_after_run, args=(server, parent), daemon=True).start()
    server.serve_until_stopped()


def _stop_after_run(server: ViewServer, parent: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Stop the server when the run's process has ended and nobody looks any more."""
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    ended = clock()
    while not server.should_exit:
        now = clock()
        nobody_looks = server.watcher.num_listeners == 0 and now - server.watcher.last_listened >= GRACE_S
        if now - ended >= LONGEST_S or (nobody_looks and now - ended >= GRACE_S):
            server.should_exit = True
        time.sleep(_TICK_S)
