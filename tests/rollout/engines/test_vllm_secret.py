"""The secret that servers demand: how they get it, what they let in, and that nobody else learns it."""

import asyncio
import dataclasses
import importlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cohort.config import config_from_dict, load_config
from cohort.errors import TrainingError, UserError
from cohort.rollout.engines.servers.handles import RemoteServer, ServerError
from cohort.rollout.engines.servers.http_api import trusted_certificates
from cohort.rollout.engines.servers.process import SERVER_SIDE
from cohort.rollout.engines.servers.secret import (
    SECRET_VARIABLE,
    Secret,
    read_or_create_secret,
    read_secret,
    request_headers,
)
from cohort.rollout.engines.vllm import server as server_module
from cohort.rollout.engines.vllm import setup as vllm_setup
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import WORKER_FOLDER, ServerOptions, ServerProcess
from cohort.rollout.environments.child_process import ChildProcess, UserCode
from cohort.trainer.inputs import build_inputs
from cohort.trainer.setup import open_engine
from fake_vllm import SECRET, FakeVllm, Impostor, ThreadServer
from runs import changed, make_inputs
from vllm_runs import assert_right, make_client, run_with
from waiting import PATIENCE_S, until

# What a server lets in

Messages = list[dict[str, Any]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads the middleware as vLLM does, with a secret file."""

    def load(content: str, module: str = "cohort_server_auth") -> Any:
        (tmp_path / "secret").write_text(content)
        monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "secret"))
        for folder in (SERVER_SIDE, WORKER_FOLDER):
            monkeypatch.syspath_prepend(folder)
        for name in ("cohort_server_auth", "cohort_vllm_middleware"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(module)

    return load


def call(middleware: Any, kind: str, *authorization: str, **scope: Any) -> tuple[bool, Messages]:
    """Whether the application got the request, and what the middleware itself answered."""
    sent: Messages = []
    came: Messages = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the request is not read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def application(*given: Any) -> None:
        came.append(given[0])
        assert given[1:] == (receive, send)

    if kind != "lifespan":
        scope["headers"] = [(b"host", b"a"), *((b"authorization", value.encode("latin-1")) for value in authorization)]
    asyncio.run(middleware(application)({"type": kind, **scope}, receive, send))
    return bool(came), sent


def test_whoever_has_the_secret_comes_in(load):
    middleware = load("abc123\n").RequireSecret
    for kind in ("http", "websocket"):
        assert call(middleware, kind, "Bearer abc123", path="/update_weights") == (True, [])
    assert call(middleware, "lifespan") == (True, [])  # the server's own start and stop


@pytest.mark.parametrize(
    "authorization",
    [
        (),
        ("",),
        ("abc123",),
        ("Bearer ",),
        ("Bearer abc12",),
        ("Bearer abc1234",),
        ("Bearer ABC123",),
        ("Basic abc123",),
        ("Bearer \xff",),
        ("Bearer wrong", "Bearer abc123"),
    ],
)
def test_nobody_else_does(load, authorization: tuple[str, ...]):
    middleware = load("abc123").RequireSecret
    for method, path in (("GET", "/health"), ("POST", "/pause"), ("OPTIONS", "/v1/models"), ("GET", "/metrics/")):
        came, (start, body) = call(middleware, "http", *authorization, method=method, path=path)
        assert not came and start["status"] == 401 and b"abc123" not in body["body"]
    assert call(middleware, "websocket", *authorization) == (False, [{"type": "websocket.close", "code": 1008}])


@pytest.mark.parametrize("content", ["", "\n"])
def test_a_server_without_a_secret_does_not_start(load, monkeypatch: pytest.MonkeyPatch, content: str):
    with pytest.raises(ValueError, match="holds no secret"):
        load(content)


# Whole weights


def test_nothing_is_sampled_after_an_update_that_broke_off(load):
    """Not even by a trainer that resumes the server; a complete update ends it, also of another trainer."""
    answers = {"/update_weights": 200, "/finish_weight_update": 200}

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": answers.get(scope["path"], 200), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = load("s3cret", "cohort_vllm_middleware").RequireWholeWeights(app)

    def status(path: str) -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(middleware({"type": "http", "path": path, "headers": []}, None, send))
        return sent[0]["status"]

    answers["/update_weights"] = 400  # the declared tensors do not match: nothing has changed
    assert [status(path) for path in ("/update_weights", "/resume", "/inference/v1/generate")] == [400, 200, 200]
    answers["/update_weights"] = 200
    assert [status(path) for path in ("/update_weights", "/inference/v1/generate", "/resume")] == [200, 200, 503]
    answers["/update_weights"] = 500
    assert [status(path) for path in ("/update_weights", "/resume", "/inference/v1/generate", "/x")] == [
        500,
        503,
        503,
        503,
    ]
    questions = (
        "/health",
        "/version",
        "/v1/models",
        "/get_world_size",
        "/weight_info",
        "/pause",
        "/start_weight_update",
    )
    assert {status(path) for path in questions} == {200}
    answers["/update_weights"] = 200
    assert [status(path) for path in ("/update_weights", "/finish_weight_update", "/resume")] == [200, 200, 200]
    assert status("/inference/v1/generate") == 200


# How it gets there

# Stands in for a server: it imports the middleware as vLLM does, and lives on. `told` is what it has learned.
SERVER = f"""
import os, sys, time
sys.path.insert(0, {str(SERVER_SIDE)!r})
import cohort_server_auth
from pathlib import Path
Path(sys.argv[1]).write_bytes(cohort_server_auth._EXPECTED)
os.rename(sys.argv[1], sys.argv[1] + ".told")
print("up", os.environ, sys.argv, flush=True)
time.sleep(600)
"""


def test_only_the_server_learns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not by command lines, environments or logs, those of agents too; a restarted server gets it again."""
    secret = Secret.new()
    told = tmp_path / "it.told"
    monkeypatch.setattr(
        server_module, "server_command", lambda *_: ([sys.executable, "-c", SERVER, str(tmp_path / "it")], {})
    )
    options = ServerOptions(python="", model="", device="cpu", dtype="float32", max_model_len=8, max_num_seqs=1)
    process = ServerProcess(options, secret=secret, log_file=tmp_path / "logs" / "server.log")
    own_files = set(os.listdir("/proc/self/fd"))
    try:
        for _ in range(2):
            process.start()
            until(lambda: "up" in process.log() or process.poll() is not None)
            assert told.read_bytes() == f"Bearer {secret.text}".encode()
            told.unlink()
            agent = ChildProcess(UserCode(name="agent", key="rollout.agent"))  # inherits what the run has
            children = psutil.Process().children(recursive=True)
            assert {agent.process.pid, process._process.pid} <= {child.pid for child in children}
            for seen in (psutil.Process(), *children):
                assert secret.text not in str(seen.environ()) and secret.text not in str(seen.cmdline())
            assert secret.text not in str(dict(os.environ))
            agent.kill()
            del agent  # and its log
        assert SECRET_VARIABLE not in os.environ
        assert secret.text not in (tmp_path / "logs" / "server.log").read_text()
    finally:
        process.stop()
    assert set(os.listdir("/proc/self/fd")) <= own_files  # no pipe is left open
    assert secret.text not in f"{secret} {secret!r} {process.__dict__}"


# To whom it goes


@pytest.mark.parametrize(
    ("server", "query", "proof"),
    [
        # printf '8000 abc' | openssl dgst -sha256 -hmac s3cret
        (("127.0.0.1", 8000), b"nonce=abc", b"a1dd6e0cad51b93dde17a2e39f0316217a635de08738f38bb4049cd051be88a5"),
        (("127.0.0.1", 8001), b"nonce=abc", b"22f4e77fd11c115e6adc3fd8c424f73b238e955944381b28208d8f0c71d51f78"),
        (("127.0.0.1", 8000), b"", b""),
        (("/a/socket", None), b"nonce=abc", b""),
    ],
)
def test_a_server_proves_that_it_knows_the_secret_on_its_port(load, server, query: bytes, proof: bytes):
    middleware = load("s3cret").RequireSecret
    came, (start, body) = call(middleware, "http", path="/cohort/proof", query_string=query, server=server)
    assert not came and start["status"] == 200
    assert body["body"] == proof


@pytest.fixture
def real() -> Iterator[ThreadServer]:
    server = ThreadServer()
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("relays", [False, True])
def test_whoever_has_taken_a_port_gets_no_secret(real: ThreadServer, relays: bool):
    secret = Secret(SECRET, mutual=True)
    impostor = Impostor(relay_to=int(real.url.rpartition(":")[2]) if relays else 0)

    async def is_healthy(url: str) -> bool:
        async with make_client(PATIENCE_S, mutual=True) as client:
            return await client.healthy(url)

    assert asyncio.run(is_healthy(real.url)) and VllmApi(real.url, secret=secret, timeout_s=PATIENCE_S).version()
    for ask in (
        lambda: asyncio.run(is_healthy(impostor.url)),
        lambda: VllmApi(impostor.url, secret=secret, timeout_s=PATIENCE_S).version(),
    ):
        with pytest.raises(
            ServerError, match=rf"answers at {impostor.url} is not the server that this run has started"
        ):
            ask()
    impostor.close()
    assert impostor.received.count(b"GET /cohort/proof?nonce=") == impostor.received.count(b"\r\n\r\n") == 2
    assert b"Authorization" not in impostor.received and SECRET.encode() not in impostor.received


def test_a_run_goes_on_with_another_port_if_the_first_was_taken():
    impostor = Impostor()

    class Handle(ThreadServer):
        def start(self, port: int = 0) -> None:
            super().start(port)
            if len(self.fakes) == 1:
                self.url = impostor.url  # what listens there is not the server

    with run_with(handle := Handle(), mutual=True) as run:
        assert_right(run.generate(4))
    assert len(handle.fakes) == 2
    assert any(f"answers at {impostor.url} is not the server that this run has started" in n for n in run.notes)
    impostor.close()
    assert impostor.received and SECRET.encode() not in impostor.received


def test_a_server_that_ends_while_it_is_asked_is_no_impostor():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(ServerError, match=r"/version: .*(the connection was closed|reset by peer)"):
            VllmApi(url, secret=Secret(SECRET, mutual=True), timeout_s=PATIENCE_S).version()


# Secret files


def test_a_file_is_created_once_and_for_its_owner_alone(tmp_path: Path):
    file = tmp_path / "secret"
    before = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(read_or_create_secret, [str(file)] * 32))
    finally:
        os.umask(before)
    assert len({secret.text for secret in read}) == 1 and len(bytes.fromhex(read[0].text)) == 16
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["secret"]
    assert read_secret(str(file)) == read[0] != Secret.new() != Secret.new()


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "does not exist; `cohort serve` creates it"),
        ("abc", 0o604, r"is open to all users \(mode 0604\); use `chmod 600`"),
        ("", 0o600, "must hold one word of ASCII characters"),
        ("hidden words", 0o600, "must hold one word of ASCII characters"),
        ("hidden\xe9", 0o600, "must hold one word of ASCII characters"),
    ],
)
def test_files_that_hold_no_secret(tmp_path: Path, content: str | None, mode: int, said: str):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(UserError, match=f"^rollout.secret_file: '{file}' {said}") as caught:
        read_secret(str(file))
    assert "hidden" not in str(caught.value)


def test_a_file_that_cannot_be_created(tmp_path: Path):
    with pytest.raises(UserError, match=r"^rollout.secret_file: '.*' cannot be created: No such file or directory$"):
        read_or_create_secret(str(tmp_path / "nowhere" / "secret"))
    with pytest.raises(UserError, match=r"^rollout.secret_file: '.*' cannot be read: Is a directory$"):
        read_or_create_secret(str(tmp_path))


def test_a_missing_file_belongs_next_to_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where `cohort serve` and the run both find it, whatever their working directories."""
    (tmp_path / "configs").mkdir()
    config = tmp_path / "configs" / "run.yaml"
    config.write_text(
        "{model: {path: m}, data: {path: d}, rewards: [{use: math}], rollout: {engine: vllm, secret_file: s}}"
    )
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/run.yaml").rollout.secret_file == str(tmp_path / "configs" / "s")
    (tmp_path / "s").touch()
    assert load_config("configs/run.yaml").rollout.secret_file == str(tmp_path / "s")  # it is there already


# Of a run


def test_which_secret_a_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_setup, "check_vllm", lambda python: "0.32.0")
    raw = changed(make_inputs(tmp_path), rollout={"engine": "vllm"}, hardware={"device": "cpu"})
    file = str(tmp_path / "secret")

    def secret_of(**rollout: Any) -> Secret | None:
        config = config_from_dict(changed(raw, rollout=rollout))
        return open_engine(config, build_inputs(config)).secret

    elsewhere = {"urls": ["http://a:1"]}
    first, second = secret_of(), secret_of()
    assert first is not None and second is not None and first != second  # in memory alone
    assert secret_of(**elsewhere) is None
    with pytest.raises(UserError, match="does not exist"):
        secret_of(**elsewhere, secret_file=file)
    created = secret_of(secret_file=file)  # so that others can look at the run's own servers
    assert created == dataclasses.replace(read_secret(file), mutual=True)
    assert secret_of(**elsewhere, secret_file=file) == read_secret(file)
    assert first.mutual and not read_secret(file).mutual  # servers elsewhere may be behind a proxy
    monkeypatch.setenv("ROLLOUT_KEY", "sk-1")
    assert secret_of(**elsewhere, api_key_env="ROLLOUT_KEY") == Secret("sk-1")
    for value, said in {"": "is not set; export it", "two words": "must hold one word of ASCII characters"}.items():
        monkeypatch.setenv("ROLLOUT_KEY", value)
        with pytest.raises(UserError, match=f"rollout.api_key_env: the environment variable 'ROLLOUT_KEY' {said}"):
            secret_of(**elsewhere, api_key_env="ROLLOUT_KEY")
    for other in ({}, {**elsewhere, "secret_file": file}):
        with pytest.raises(UserError, match="api_key_env: ROLLOUT_KEY has no effect with"):
            secret_of(**other, api_key_env="ROLLOUT_KEY")


class RefusingServer(ThreadServer):
    """As a gateway refuses."""

    def start(self, port: int = 0) -> None:
        super().start(port)
        self.fakes[0].refuses_with = 403


@pytest.mark.parametrize(("handle", "code"), [(ThreadServer(), 401), (RefusingServer(), 403)])
def test_another_secret_ends_the_run_and_says_which_key_to_set(handle: ThreadServer, code: int):
    handle.start()
    (fake,) = handle.fakes
    fake.secret = "another"
    try:
        with run_with(RemoteServer(handle.url)) as run, pytest.raises(TrainingError) as error:
            run.generate(1)
    finally:
        handle.stop()
    said = f"{handle.url}/health: the server demands another secret (HTTP {code}); rollout.secret_file"
    assert said in str(error.value) and "or rollout.api_key_env a variable" in str(error.value)
    assert SECRET not in f"{error.value} {run.notes}"
    assert fake.calls.keys() == {"without the secret"}


def test_every_request_has_the_secret():
    servers = ThreadServer(), ThreadServer()
    with run_with(*servers) as run:
        assert_right(run.generate(4))
    for server in servers:
        calls = server.fakes[0].calls
        assert calls["/health"] and calls["/v1/models"] and not calls["without the secret"]
    assert sum(server.fakes[0].calls["/inference/v1/generate"] for server in servers) == 4
    assert request_headers(None) == {}


# TLS


class TlsServer(ThreadServer):
    """With a certificate of its own for this address."""

    def __init__(self, folder: Path):
        super().__init__()
        self.certificate, self._key = folder / "certificate.pem", folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
                *("-days", "2", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(self._key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
        )

    def start(self, port: int = 0) -> None:
        super().start(port)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        assert self._server is not None
        # handshakes in the handlers' threads: one that a closing client leaves unfinished must not block `accept`
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = self.url.replace("http:", "https:")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = TlsServer(tmp_path)
    server.start()
    try:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with run_with(RemoteServer(server.url)) as run, pytest.raises(TrainingError) as error:
            run.generate(1)
        assert f"{server.url}: [SSL: CERTIFICATE_VERIFY_FAILED]" in str(error.value)
        assert "set SSL_CERT_FILE to the file with its certificate" in str(error.value)
        assert not server.fakes[0].calls
        monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
        with run_with(RemoteServer(server.url)) as run:
            assert_right(run.generate(4))
            assert VllmApi(server.url, secret=Secret(SECRET), timeout_s=PATIENCE_S).version() == "0.32.0"
    finally:
        server.stop()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"SSL_CERT_FILE: .* holds no certificates that can be read"):
        trusted_certificates()


def test_a_server_without_the_endpoints_for_weights_says_how_to_start_it():
    class Plain(FakeVllm):
        def do(self, path: str, body: Any) -> tuple[Any, int]:
            return {"detail": "Not Found"}, 404

    server = ThreadServer(make=Plain)
    server.start()
    try:
        with pytest.raises(ServerError, match="/pause: HTTP 404: Not Found; start the server with `cohort serve`"):
            VllmApi(server.url, secret=Secret(SECRET), timeout_s=PATIENCE_S).pause()
    finally:
        server.stop()
