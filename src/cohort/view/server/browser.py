"""How a person gets to the page: the printed address, the SSH tunnel, the browser."""

import getpass
import html
import os
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit


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
