"""The server: every token is equally likely, and an update of weights is a number."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


class StubServer(ThreadingHTTPServer):
    """Listens on a free port."""

    daemon_threads = True

    def __init__(self, vocab_size: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.vocab_size = vocab_size
        self.versions: list[int] = []  # that were published
        self.sampled_versions: list[int] = []  # of each answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, body: dict[str, Any]) -> dict[str, Any]:
        self.versions.append(body["version"])
        return {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sampled_versions.append(self.versions[-1])
        tokens = np.random.default_rng(body["seed"]).integers(self.vocab_size, size=body["max_tokens"])
        logprobs = [-math.log(self.vocab_size)] * len(tokens)
        return {"token_ids": tokens.tolist(), "logprobs": logprobs, "version": self.versions[-1]}


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"/publish": self.server.publish, "/generate": self.server.generate}[self.path](body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(vocab_size: int) -> Iterator[StubServer]:
    with StubServer(vocab_size) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
