"""The server: every token is equally likely, whatever the weights are."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


class StubServer(ThreadingHTTPServer):
    """Listens on a port, by default a free one."""

    daemon_threads = True

    def __init__(self, vocab_size: int, max_model_len: int, gpu_memory_utilization: float, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.gpu_memory_utilization = gpu_memory_utilization
        self.asleep = False
        self.versions: list[int] = []  # that were published
        self.dtypes: dict[str, str] = {}  # of the tensors that were published last, by name
        self.sampled_versions: list[int] = []  # of each answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def limits(self) -> dict[str, Any]:
        return {"max_model_len": self.max_model_len}

    def sleep(self) -> dict[str, Any]:
        self.asleep = True
        return {}

    def publish(self, version: int, dtypes: dict[str, str]) -> dict[str, Any]:
        self.asleep = False
        self.versions.append(version)
        self.dtypes = dtypes
        return {}

    def generate(self, seeds: list[int], max_tokens: int, top_p: float, top_k: int) -> dict[str, Any]:
        assert not self.asleep
        version = self.versions[-1]
        self.sampled_versions.append(version)
        likeliest = min(math.ceil(top_p * self.vocab_size), top_k or self.vocab_size)
        tokens = [np.random.default_rng(seed).integers(likeliest, size=max_tokens).tolist() for seed in seeds]
        return {"token_ids": tokens, "logprob": -math.log(likeliest), "version": version}


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = getattr(self.server, self.path.removeprefix("/"))(**body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(vocab_size: int, max_model_len: int = 4096, gpu_memory_utilization: float = 0.9) -> Iterator[StubServer]:
    with StubServer(vocab_size, max_model_len, gpu_memory_utilization) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
