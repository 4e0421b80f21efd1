"""Servers that die, and who is left behind."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
import torch

from cohort.models.saving import stream_weights, weight_specs
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import ServerProcess, root_cause
from fake_vllm import Impostor
from serving import (
    SECRET,
    Server,
    engine_of,
    generate,
    options_for,
    processes_of,
    send,
    serving_folder,
    serving_model,
    start,
)
from tiny import policy_of, save_model_folder
from waiting import PATIENCE_S, until


@pytest.fixture
def process(tmp_path: Path, vllm_python: str) -> Iterator[ServerProcess]:
    folder = serving_folder(tmp_path, tie=False)
    process = ServerProcess(options_for(vllm_python, folder), secret=SECRET, log_file=tmp_path / "server.log")
    yield process
    process.stop()


def test_a_server_that_died_is_told_leaves_nothing_behind_and_starts_again(process: ServerProcess):
    """Its engine is killed while it serves, and in an update after its restart."""
    start(process)
    first_url = process.url
    engine_of(process.log_file).send_signal(signal.SIGKILL)
    until(lambda: process.poll() is not None)
    assert str(process.poll()).startswith("exited with code")  # with exit code 0, for all that it failed
    until(lambda: not processes_of(process.log_file))  # its guard and the kernel may take their time

    start(process)
    assert process.url != first_url
    server = Server(process=process, tie=False)
    model = serving_model(tie=False, seed=1)
    server.publish(model, 1)
    server.assert_serves(model, 1)

    policy = policy_of(serving_model(tie=False, seed=2))
    server.channel.begin(weight_specs(policy, torch.float32))
    weights = stream_weights(policy, torch.float32)
    send(server.channel, *next(weights))
    engine_of(process.log_file).send_signal(signal.SIGKILL)
    with pytest.raises(ServerError, match=server.api.url):
        for name, tensor in weights:
            send(server.channel, name, tensor)
        server.channel.finish(2)
    server.close()
    process.stop()
    until(lambda: not processes_of(process.log_file))  # its guard and the kernel may take their time
    process.stop()  # again does nothing


def test_a_port_in_use_is_a_failed_start_and_gets_no_secret(process: ServerProcess, monkeypatch: pytest.MonkeyPatch):
    impostor = Impostor()
    monkeypatch.setattr("cohort.rollout.engines.servers.process._free_port", lambda: impostor.port)
    process.start()
    with closing(VllmApi(process.url, secret=SECRET, timeout_s=PATIENCE_S)) as api, pytest.raises(ServerError) as error:
        api.version()
    assert "is not the server that this run has started" in str(error.value)
    until(lambda: process.poll() is not None, timeout_s=600)
    impostor.close()
    assert process.poll() == "exited with code 1"
    assert "address already in use" in process.log().lower()
    assert b"/cohort/proof?nonce=" in impostor.received and SECRET.text.encode() not in impostor.received


def test_the_cause_of_an_end_is_found_in_the_log(tmp_path: Path, vllm_python: str):
    """vLLM's kernels on CPUs take no heads of 16; it finds that out when it is first asked."""
    folder = save_model_folder(tmp_path, "qwen3", head_dim=16, max_position_embeddings=1024)
    process = ServerProcess(options_for(vllm_python, folder), secret=SECRET, log_file=tmp_path / "server.log")
    try:
        start(process)
        assert root_cause(process.log()) is None
        with suppress(httpx.HTTPError, ServerError):
            generate(process.url, [5, 6, 7])
        until(lambda: process.poll() is not None)
        assert str(root_cause(process.log())).startswith(
            "RuntimeError: Unsupported CPU attention configuration: head_dim"
        )
        assert "head_dim" not in "".join(process.log().splitlines()[-40:])
    finally:
        process.stop()


TRAINER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from cohort.rollout.engines.vllm.server import ServerProcess
from serving import SECRET, options_for, start
folder = Path(sys.argv[2])
process = ServerProcess(options_for(sys.argv[1], folder), secret=SECRET, log_file=folder / "server.log")
start(process)
print("ready", flush=True)
time.sleep(600)
"""


def test_servers_end_with_a_trainer_that_is_killed(tmp_path: Path, vllm_python: str):
    folder = serving_folder(tmp_path, tie=False)
    command = [sys.executable, "-c", TRAINER, vllm_python, str(folder), *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        watchdog = threading.Timer(600, trainer.kill)
        watchdog.start()
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        watchdog.cancel()
        serving = processes_of(folder / "server.log")
        assert engine_of(folder / "server.log") in serving
        trainer.kill()
    assert not psutil.wait_procs(serving, timeout=300)[1]
