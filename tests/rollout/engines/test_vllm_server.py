"""Servers as processes, without vLLM: `tests/real_vllm` has the real ones."""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from cohort.errors import UserError
from cohort.rollout.engines.servers import process as server_process
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.process import SERVER_SIDE
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm import server as server_module
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import (
    EXECUTOR,
    WORKER_FOLDER,
    ServerOptions,
    ServerProcess,
    check_vllm,
    server_command,
)
from waiting import group_of, is_running, until

OPTIONS: dict[str, Any] = {
    "python": "/env/bin/python",
    "model": "/models/m",
    "dtype": "bfloat16",
    "max_model_len": 768,
    "max_num_seqs": 32,
}


def flags(**options: Any) -> tuple[dict[str, str | None], dict[str, str]]:
    """The options of a command line with their values, and the environment."""
    (python, module_flag, module, *rest), environment = server_command(ServerOptions(**{**OPTIONS, **options}), 8123)
    assert (python, module_flag, module) == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    given: dict[str, str | None] = {}
    for word in rest:
        if word.startswith("--"):
            assert word not in given or word == "--middleware"
            given[word] = None
        else:
            given[list(given)[-1]] = word
    return given, environment


def test_the_command_on_a_cpu():
    given, environment = flags(device="cpu", dtype="float32")
    assert given == {
        "--model": "/models/m",
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--dtype": "float32",
        "--max-model-len": "768",
        "--max-num-seqs": "32",
        "--seed": "0",
        "--enable-scale-out": None,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": "cohort_vllm_worker.CohortWorker",
        "--weight-transfer-config": '{"backend": "cohort"}',
        "--disable-uvicorn-access-log": None,
        "--enforce-eager": None,
        "--distributed-executor-backend": "uni",
        "--kv-cache-memory-bytes": str(2**28),
        "--no-enable-chunked-prefill": None,
        "--max-num-batched-tokens": "2048",
        "--middleware": "cohort_server_auth.RequireSecret",
    }
    long, _ = flags(device="cpu", max_model_len=5000)
    assert long["--max-num-batched-tokens"] == "5000"  # a prompt is computed at once
    assert environment["OMP_NUM_THREADS"] == "1" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PYTHONPATH"] == f"{SERVER_SIDE}:{WORKER_FOLDER}"
    assert environment["PYTHONSAFEPATH"] == "1", "or a script vllm.py in the working directory is imported"
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(("tensor_parallel", "executor"), [(1, "uni"), (2, EXECUTOR)])
def test_the_command_on_gpus(tensor_parallel: int, executor: str):
    given, environment = flags(device="cuda", gpus="2,3", tensor_parallel=tensor_parallel, gpu_memory_utilization=0.8)
    assert given["--distributed-executor-backend"] == executor
    assert given["--tensor-parallel-size"] == str(tensor_parallel)
    assert given["--gpu-memory-utilization"] == "0.8"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"--enforce-eager", "--enable-sleep-mode", "--kv-cache-memory-bytes"} & given.keys()
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & environment.keys()
    assert "--enable-sleep-mode" in flags(device="cuda", sleep=True)[0]


def test_an_adapter_has_the_policys_name_and_the_model_another():
    given, environment = flags(device="cpu", lora_rank=20)
    assert (given["--served-model-name"], given["--max-lora-rank"]) == ("policy-base", "32")
    assert "--enable-lora" in given and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_options_of_the_user_come_last():
    given, _ = flags(device="cpu", extra={"quantization": "fp8", "max-num-seqs": 7, "enforce_eager": False})
    assert (given["--quantization"], given["--max-num-seqs"]) == ("fp8", "7")
    assert "--enforce-eager" not in given


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, {"": '{"head_dtype": "float32"}'}),
        ({"hf_overrides": {"head_dtype": "model"}}, {"": '{"head_dtype": "model"}'}),
        ({"hf-overrides": {"rope_theta": 5}}, {"": '{"head_dtype": "float32", "rope_theta": 5}'}),
        ({"hf-overrides": '{"rope_theta": 5}'}, {"": '{"head_dtype": "float32", "rope_theta": 5}'}),
        ({"hf-overrides.rope_theta": 5}, {".head_dtype": "float32", ".rope_theta": "5"}),
        ({"hf_overrides.head_dtype": "model"}, {".head_dtype": "model"}),
    ],
)
def test_the_head_computes_in_float32_beside_the_users_overrides(extra: dict[str, Any], expected: dict[str, str]):
    """As a whole or as fields: vLLM keeps only one of them."""
    given, _ = flags(device="cuda", extra=extra)
    assert {key: value for key, value in given.items() if key.startswith("--hf-overrides")} == {
        f"--hf-overrides{field}": value for field, value in expected.items()
    }


def test_a_server_in_float32_has_such_a_head_anyway():
    given, _ = flags(device="cuda", dtype="float32", extra={"hf_overrides": {"rope_theta": 5}})
    assert given["--hf-overrides"] == '{"rope_theta": 5}'
    assert "--hf-overrides" not in flags(device="cuda", dtype="float32")[0]
    assert "--hf-overrides" not in flags(device="cuda", extra={"quantization": "fp8"})[0]


def test_the_secret_is_demanded_before_the_users_middleware():
    command, _ = server_command(ServerOptions(**OPTIONS, device="cpu", extra={"middleware": "mine.Middleware"}), 8123)
    given = [value for flag, value in pairwise(command) if flag == "--middleware"]
    assert given == [
        "mine.Middleware",
        "cohort_vllm_middleware.RequireWholeWeights",
        "cohort_server_auth.RequireSecret",
    ]  # vLLM wraps one around the other


def test_a_python_without_vllm_is_the_users_to_mend(tmp_path: Path):
    with pytest.raises(UserError, match=r"rollout\.vllm_python: .* has no vLLM.*pip install 'vllm==0\.32\.\*'"):
        check_vllm(sys.executable)
    with pytest.raises(UserError, match=r"rollout\.vllm_python: '/no/python' is not a working Python"):
        check_vllm("/no/python")


@pytest.mark.parametrize(
    ("version", "known"), [("0.32.0", True), ("0.32.9", True), ("0.35.0", True), ("0.31.2", False), ("0.3.2", False)]
)
def test_a_vllm_older_than_any_that_was_tested_is_refused(tmp_path: Path, version: str, known: bool):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho \'{{"vllm": "{version}"}}\'\n')
    python.chmod(0o755)
    if known:
        assert check_vllm(str(python)) == version
    else:
        with pytest.raises(UserError, match=rf"has vLLM {version}, but Cohort needs 0\.32 or newer"):
            check_vllm(str(python))


# What stands in for a server: it has a child that ignores SIGTERM, as engines left behind do.
SERVER = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
inherited = [name for name in ("RANK", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
             if name in os.environ] + [name for name in os.environ if name.startswith("TORCHELASTIC")]
print("port", sys.argv[1], inherited, flush=True)
{then}
"""


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a server process whose command is a script."""
    made: list[ServerProcess] = []

    def make(then: str) -> ServerProcess:
        script = SERVER.format(then=then)

        def command(options: ServerOptions, port: int) -> tuple[list[str], dict[str, str]]:
            return [sys.executable, "-c", script, str(port)], {}

        monkeypatch.setattr(server_module, "server_command", command)
        monkeypatch.setattr(server_process, "GRACE_S", 0.3)
        options = ServerOptions(**OPTIONS, device="cpu")
        made.append(ServerProcess(options, secret=Secret.new(), log_file=tmp_path / "logs" / "server.log"))
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("pass", "exited with code 0"),
        ("sys.exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_every_end_is_a_failure_and_leaves_nothing_behind(standin, then: str, said: str):
    process = standin(then)
    assert process.poll() == "not started"
    process.start()
    number = process._process.pid
    until(lambda: process.poll() is not None)
    assert process.poll() == said
    until(lambda: not group_of(number))  # its guard and the kernel may take their time
    assert process.log() == f"port {process.url.rsplit(':', 1)[1]} []\n"


def test_stop_ends_what_ignores_sigterm_and_a_start_has_a_new_port(standin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")  # of torchrun; a server has no rank
    for name in ("USE_AGENT_STORE", "RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # of training; weights that sleep lie otherwise
        monkeypatch.setenv(name, "expandable_segments:True")
    process = standin("time.sleep(600)")
    process.start()
    until(process.log)
    assert process.poll() is None
    old, url = group_of(process._process.pid), process.url
    assert len(old) == 3  # with its guard
    process.start()
    until(process.log)
    until(lambda: not any(map(is_running, old)))
    assert process.url != url
    assert process.log() == f"port {process.url.rsplit(':', 1)[1]} []\n"  # of this start alone
    current = group_of(process._process.pid)
    process.stop()
    until(lambda: not any(map(is_running, current)))


PARENT = """
import os, sys, time
from cohort.rollout.engines.servers.process import start_guarded
from cohort.rollout.engines.servers.secret import Secret
process = start_guarded([sys.executable, "-c", sys.argv[1], "1"], {}, secret=Secret.new(), log=open(os.devnull, "wb"))
if os.fork() == 0:  # a child without exec holds all that this process has open
    time.sleep(600)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_servers_end_with_a_parent_that_is_killed():
    script = SERVER.format(then="time.sleep(600)")
    command = [sys.executable, "-c", PARENT, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        until(lambda: len(group_of(number)) == 3)  # server, engine and guard
        members = group_of(number)
        parent.send_signal(signal.SIGKILL)
        try:
            until(lambda: not any(map(is_running, members)))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


class Answers(BaseHTTPRequestHandler):
    """Answers by path: a status and a body."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {
        "/health": (503, b""),
        "/weight_info": (200, b'{"weight_version": "default"}'),
        "/version": (200, b"<html>"),
        "/resume": (500, b'{"error": {"message": "first line\\nsecond line"}}'),
        "/reset_prefix_cache": (200, b'{"success": false}'),
    }

    def do_GET(self) -> None:
        status, body = self.answers[self.path.partition("?")[0]]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def test_errors_name_the_server_the_endpoint_and_what_came_back():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
        api = VllmApi(url, secret=None, timeout_s=600)
        assert api.weight_version() is None
        for call, said in (
            (api.resume, f"{url}/resume: HTTP 500: first line"),
            (api.version, f"{url}/version: no version in the answer '<html>'"),
            (api.reset_prefix_cache, f"{url}/reset_prefix_cache: keys and values are still in use"),
        ):
            with pytest.raises(ServerError) as caught:
                call()
            assert str(caught.value) == said
        api.close()
        http.shutdown()
    with pytest.raises(ServerError, match=rf"^{url}/resume: ConnectError"):
        VllmApi(url, secret=None, timeout_s=600).resume()
