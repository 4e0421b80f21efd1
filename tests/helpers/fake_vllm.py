"""A server that speaks as vLLM does and fails on demand. For the injection of faults alone: it samples no model.

The tokens of a completion are a function of its prompt and seed, as with the real one, so a test knows what a request
must bring whoever has answered it. Standard library only, so that it starts quickly.
"""

import hmac
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from waiting import free_port

VOCAB_SIZE = 50
END = 1
SECRET = "0123456789abcdef" * 2  # that every request must bring
HANG_S = 60.0  # as good as for ever: the tests' deadlines are below a second


def sampled(prompt: list[int], seed: int, limit: int) -> list[int]:
    """The tokens of one completion: 3 to 12, fewer under the limit; the last one is the end token where they end."""
    rng = random.Random(f"{prompt} {seed}")
    tokens = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(2, 11))]
    return [*tokens, END][:limit]


def logprob_of(token: int) -> float:
    return -0.01 * token


class FakeVllm:
    """What the server knows, and its faults: each request takes the next one, and none once they are used up."""

    def __init__(
        self,
        faults: list[str] | None = None,
        *,
        max_model_len: int = 64,
        seconds: float = 0.0,
        text_of: Callable[[int], str] = lambda token: "",
    ):
        self.faults = list(faults or ())
        self.max_model_len = max_model_len
        self.seconds = seconds  # that a request takes
        self.text_of = text_of  # of a token: where stop strings are looked for
        self.version = "default"  # of the weights
        self.vllm_version, self.num_workers = "0.32.0", 1
        self.secret, self.refuses_with = SECRET, 401
        self.meeting: dict[str, Any] = {}  # what it was told of the last one for weights
        self.asleep = False
        self.calls: Counter[str] = Counter()
        self.asked: list[int] = []  # first tokens of prompts, in the order in which they came
        self.num_in_flight = self.most_in_flight = 0  # completions
        self.lock = threading.Lock()

    def next_fault(self) -> str:
        with self.lock:
            return self.faults.pop(0) if self.faults else ""

    def takes(self, fault: str) -> bool:
        """Whether this is the next fault, which is used up then."""
        with self.lock:
            return self.faults[:1] == [fault] and bool(self.faults.pop(0))

    def count(self, num_completions: int) -> None:
        with self.lock:
            self.num_in_flight += num_completions
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)

    def tell(self, path: str) -> Any:
        """What a GET brings."""
        if path == "/health":
            if "deaf" in self.faults:
                time.sleep(HANG_S)
        elif path == "/v1/models":
            return {"data": [{"id": "policy", "max_model_len": self.max_model_len}]}
        elif path == "/state":
            state = {"version": self.version, "calls": self.calls, "most_in_flight": self.most_in_flight}
            return {**state, "asleep": self.asleep}
        elif path == "/version":
            return {"version": self.vllm_version}
        elif path == "/get_world_size":
            return {"world_size": self.num_workers}
        return {}

    def do(self, path: str, body: Any) -> tuple[Any, int]:
        """What a POST other than for completions does, and its answer with the status."""
        if path == "/fault":
            self.faults += body
        elif path == "/finish_weight_update":
            if self.takes("refuses_weights"):
                return {"error": "no"}, 500
            self.version, self.asleep = body["weight_version"], False
        elif path == "/init_weight_transfer_engine":
            self.meeting = body["init_info"]
            return {"error": "this one takes no weights"}, 500
        elif path == "/sleep":
            self.asleep = True  # and goes by the version that it has dropped, as vLLM does
        return {}, 200

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        room = self.max_model_len - len(body["token_ids"])
        limit = min(params["max_tokens"], room)  # shortened and not said, as vLLM does
        choices = []
        for index in range(params["n"]):
            seed = 0 if params["temperature"] == 0 else params["seed"] + index
            tokens, stop = self.stopped(sampled(body["token_ids"], seed, limit), params)
            choices.append(
                {
                    "index": index,
                    "token_ids": tokens,
                    "finish_reason": "stop" if tokens[-1] == END or stop else "length",
                    "stop_reason": stop,
                    "logprobs": {"content": [{"token_id": t, "logprob": logprob_of(t)} for t in tokens]},
                    "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                }
            )
        return {"choices": choices}

    def stopped(self, tokens: list[int], params: dict[str, Any]) -> tuple[list[int], str | None]:
        """The tokens up to the first one that completes a stop string, and that string."""
        stop = params.get("stop", [])
        assert not stop or (params.get("detokenize", True) and "" not in stop)  # vLLM refuses anything else
        text = ""
        for number, token in enumerate(tokens, 1):
            text += self.text_of(token)
            if found := next((one for one in stop if one in text), None):
                return tokens[:number], found
        return tokens, None


def spoil(answer: dict[str, Any], fault: str) -> None:
    """Make an answer wrong in one way."""
    choices = answer["choices"]
    first, tokens = choices[0], choices[0]["token_ids"]
    content = first["logprobs"]["content"]
    if fault == "wrong_n":
        choices.pop()
    elif fault == "same_index":
        choices[-1]["index"] = 0
    elif fault == "nan_logprob":
        content[0]["logprob"] = float("nan")
    elif fault == "no_logprob":
        content[0]["logprob"] = -9999.0
    elif fault == "positive_logprob":
        content[0]["logprob"] = 0.5
    elif fault == "text_logprob":
        content[0]["logprob"] = "often"
    elif fault == "few_logprobs":
        content.pop()
    elif fault == "other_tokens_logprobs":
        content[0]["token_id"] += 1
    elif fault == "outside_vocabulary":
        tokens[0] = content[0]["token_id"] = VOCAB_SIZE
    elif fault == "negative_token":
        tokens[0] = content[0]["token_id"] = -1
    elif fault == "text_tokens":
        first["token_ids"] = [str(t) for t in tokens]
    elif fault == "no_tokens":
        first["token_ids"], content[:], first["weight_versions"] = [], [], []
    elif fault == "null_tokens":
        first["token_ids"] = None
    elif fault == "too_long":
        first["token_ids"] = [2] * 100
        content[:] = [{"token_id": 2, "logprob": -0.1}] * 100
        first["weight_versions"][0]["end"], first["finish_reason"] = 100, "length"
    elif fault == "end_in_the_midst":
        tokens[0] = content[0]["token_id"] = END
    elif fault == "shortened":
        del tokens[-1:], content[-1:]
        first["weight_versions"][0]["end"] -= 1
        first["finish_reason"] = "length"
    elif fault == "shortened_stop":
        del tokens[-1:], content[-1:]
        first["weight_versions"][0]["end"] -= 1
        first["finish_reason"] = "stop"
    elif fault == "abort":
        first["finish_reason"] = "abort"
    elif fault == "old_weights":
        first["weight_versions"][0]["version"] = "0"
    elif fault == "other_runs_weights":
        first["weight_versions"][0]["version"] = "1000"
    elif fault == "files_weights":
        first["weight_versions"][0]["version"] = "default"
    elif fault == "gap_in_weights":
        first["weight_versions"][0]["start"] = 1
    elif fault == "no_weights":
        first["weight_versions"] = None
    elif fault == "null":
        answer["choices"] = None
    else:
        raise ValueError(fault)


STATUSES = {"500": 500, "502": 502, "full": 503, "too_many": 429, "not_found": 404}
BODIES = {"html": b"<html><body>Bad gateway</body></html>", "cut_off": b'{"choices": [{"index": 0', "list": b"[]"}


class Handler(BaseHTTPRequestHandler):
    """One request to `fake`."""

    fake: FakeVllm

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, content: Any, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def prove(self) -> None:
        """Prove that this server knows the secret, and wait for the next request on this connection."""
        nonce = self.path.removeprefix("/cohort/proof?nonce=")
        message = f"{self.connection.getsockname()[1]} {nonce}"
        self.reply(hmac.new(self.fake.secret.encode(), message.encode(), "sha256").hexdigest().encode())
        self.close_connection = False

    def may_come_in(self) -> bool:
        """Whether the request has the secret; otherwise it has its answer already."""
        if self.headers["Authorization"] == f"Bearer {self.fake.secret}":
            return True
        self.fake.calls["without the secret"] += 1
        self.reply({"error": "no secret"}, self.fake.refuses_with)
        return False

    def do_GET(self) -> None:
        if self.path.startswith("/cohort/proof"):
            self.prove()
            return
        if not self.may_come_in():
            return
        self.fake.calls[self.path] += 1
        self.reply(self.fake.tell(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if not self.may_come_in():
            return
        path = self.path.partition("?")[0]
        self.fake.calls[path] += 1
        if path == "/inference/v1/generate":
            self.generate(body)
        else:
            self.reply(*self.fake.do(path, body))

    def generate(self, body: dict[str, Any]) -> None:
        fault = self.fake.next_fault()
        answer = self.fake.answer(body)
        self.fake.asked.append(body["token_ids"][0])
        self.fake.count(body["sampling_params"]["n"])
        try:
            self.misbehave(fault, answer)
        finally:
            self.fake.count(-body["sampling_params"]["n"])

    def misbehave(self, fault: str, answer: dict[str, Any]) -> None:
        time.sleep(self.fake.seconds)
        if fault.startswith("late"):
            time.sleep(float(fault.removeprefix("late")))
            fault = ""
        if fault == "hang":
            time.sleep(HANG_S)
        elif fault == "die":
            print("engine core died", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
        elif fault in STATUSES:
            self.reply({"error": {"message": "no"}}, STATUSES[fault])
        elif fault in BODIES:
            self.reply(BODIES[fault])
        else:
            if fault:
                spoil(answer, fault)
            self.reply(answer)


def make_handler(fake: FakeVllm) -> type[Handler]:
    return type("Handler", (Handler,), {"fake": fake})


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """A client that has gone away is what these tests are about."""


class ThreadServer:
    """A handle of a server in a thread of this process; each start has the faults of its turn."""

    def __init__(self, *faults: list[str], make: Callable[..., FakeVllm] = FakeVllm, **options: Any):
        self.faults, self.make, self.options = list(faults), make, options
        self.url = ""
        self.fakes: list[FakeVllm] = []  # one for each start
        self._server: _Server | None = None

    def start(self, port: int = 0) -> None:
        faults = self.faults.pop(0) if self.faults else []
        self.fakes.append(self.make(faults, **self.options))
        self._server = _Server(("127.0.0.1", port), make_handler(self.fakes[-1]))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # a short poll: shutdown waits for it
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def poll(self) -> str | None:
        return None

    def log(self) -> str:
        return "no log"

    def stop(self) -> None:
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()


class ProcessServer:
    """A handle of a server in a process of its own."""

    def __init__(self, log_file: Path, *faults: list[str], **options: Any):
        self.log_file, self.faults, self.options = log_file, list(faults), options
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        faults = self.faults.pop(0) if self.faults else []
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(port), json.dumps(faults), json.dumps(self.options)],
                stdout=log,
                stderr=log,
            )

    def poll(self) -> str | None:
        code = self.process.poll() if self.process else None
        return None if code is None else f"exit code {code}"

    def log(self) -> str:
        return self.log_file.read_text()

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


class Impostor:
    """A process that has taken the port of a server: it records what it receives, and answers that all is well."""

    def __init__(self, relay_to: int = 0):
        """With a port, answer what the server there answers."""
        self.received = b""
        self.relay_to = relay_to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        body = json.dumps({"version": "0.32.0", "data": [{"id": "policy", "max_model_len": 64}]}).encode()
        fine = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                self.received += data
                if self.relay_to:
                    with socket.create_connection(("127.0.0.1", self.relay_to)) as server:
                        server.sendall(data)
                        fine = b""
                        while len(fine.partition(b"\r\n\r\n")[2]) < 64:
                            fine += server.recv(65536)
                connection.sendall(fine)

    def close(self) -> None:
        self._listener.close()


if __name__ == "__main__":
    if "die_at_start" in sys.argv[2]:
        sys.exit("this model has no weights")
    if "raise_at_start" in sys.argv[2]:
        try:
            raise RuntimeError("head_dim=16")
        except RuntimeError as error:
            raise ConnectionError("EngineCore encountered an issue") from error
    with _Server(
        ("127.0.0.1", int(sys.argv[1])), make_handler(FakeVllm(json.loads(sys.argv[2]), **json.loads(sys.argv[3])))
    ) as server:
        server.serve_forever()
