"""A server of the page in a thread, and a client that sends requests exactly as they are written."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config import CONFIG_HEADER
from cohort_view.server.serve import ViewServer


@dataclass(frozen=True)
class Answer:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> bytes:
        """The body, uncompressed."""
        return gzip.decompress(self.raw) if self.headers.get("content-encoding") == "gzip" else self.raw

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Client:
    """Sends requests to a server, with its cookie or without."""

    def __init__(self, server: ViewServer):
        self.port = server.port
        self.token = server.address.partition("token=")[2]
        self.cookie = self.get(f"/?token={self.token}").headers["set-cookie"].partition(";")[0]

    def get(self, path: str, *headers: str, method: str = "GET", host: str | None = None) -> Answer:
        """Send a request without the cookie."""
        return self.send(self._request(path, *headers, method=method, host=host))

    def get_in(self, path: str, *headers: str, method: str = "GET", host: str | None = None) -> Answer:
        """Send a request with the cookie."""
        return self.get(path, f"Cookie: {self.cookie}", *headers, method=method, host=host)

    def send(self, request: bytes) -> Answer:
        """Send bytes and read the answer to its end."""
        with self._connect() as connection:
            connection.sendall(request)
            received = b""
            while more := connection.recv(65536):
                received += more
        return _parse(received)

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """Open a stream of server-sent events; yields their names and data as they come."""
        with self._connect() as connection:
            connection.sendall(self._request(path, f"Cookie: {self.cookie}"))
            with connection.makefile("rb") as lines:
                yield _events(lines)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def _request(self, path: str, *headers: str, method: str = "GET", host: str | None = None) -> bytes:
        host = f"127.0.0.1:{self.port}" if host is None else host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


@contextmanager
def serving(*folders: Path, root: Path | None = None) -> Iterator[ViewServer]:
    """Serve run folders in a thread."""
    server = ViewServer(folders, root=root, port=0)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def make_run(folder: Path) -> Path:
    """Make a run folder with two steps and an evaluation."""
    (folder / "completions").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"{CONFIG_HEADER}run: {{dir: {folder.name}}}\n")
    rows = [
        {"step": 0, "kind": "eval", "timestamp": 9.0, "eval/accuracy": 0.25},
        {"step": 1, "kind": "train", "timestamp": 10.0, "reward": 0.5},
        {"step": 2, "kind": "train", "timestamp": 11.5, "reward": float("nan"), "loss": -1e-3},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _parse(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Answer(int(status.split()[1]), headers, body)


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        yield rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


def _events(lines: Any) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])
