"""An HTTP server on loopback that answers JSON, and fails on demand."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer:
    """Answers each POST with the next of `faults`, and once they are used up with `answer(body)`."""

    def __init__(self, answer: Callable[[Any], Any], *, models: tuple[str, ...] = ("judge",)) -> None:
        self.answer = answer
        self.models = models
        self.faults: list[tuple[int, dict[str, str]]] = []  # status and headers; status 0: close the connection
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.num_in_flight = self.most_in_flight = 0
        self.url = ""


@contextmanager
def serving(answer: Callable[[Any], Any], **settings: Any) -> Iterator[JsonServer]:
    """Run a server within the context."""
    state = JsonServer(answer, **settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": name, "max_model_len": 4096} for name in state.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.bodies.append(body)
                state.paths.append(self.path)
                state.keys.add(self.headers.get("Authorization"))
                state.num_in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.num_in_flight)
                status, headers = state.faults.pop(0) if state.faults else (200, {})
            try:
                if status == 0:
                    self.close_connection = True
                    return
                with suppress(ConnectionError):  # the client no longer waits
                    self.send(status, state.answer(body) if status == 200 else {"error": "overloaded"}, headers)
            finally:
                with state.lock:
                    state.num_in_flight -= 1

        def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def chat_reply(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
