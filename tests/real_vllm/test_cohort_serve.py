"""`cohort serve` with the real vLLM: it answers where it was told to and whom, and goes when it is told to."""

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import read_secret
from cohort.rollout.engines.vllm.api import VllmApi
from serving import healthy
from tiny import save_model_folder
from waiting import free_port, until


def test_a_server_for_others(tmp_path: Path, vllm_python: str):
    model = save_model_folder(tmp_path / "model", "qwen3", tie=True, head_dim=32, hidden_size=64)
    port = free_port()
    rollout = {"engine": "vllm", "vllm_python": vllm_python, "max_prompt_tokens": 40, "max_completion_tokens": 24}
    rollout["secret_file"] = "secret"
    config = {"model": {"path": str(model)}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**config, "rollout": rollout, "hardware": {"device": "cpu"}}))
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cohort", "serve", str(file), "--port", str(port)], stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"
    secret_file = tmp_path / "secret"  # next to the configuration
    try:
        until(lambda: secret_file.exists() or process.poll() is not None, timeout_s=600)
        secret = read_secret(str(secret_file))
        until(lambda: healthy(url, secret) or process.poll() is not None, timeout_s=900, every_s=0.1)
        assert process.poll() is None, log.read_text(errors="replace")
        started = psutil.Process(process.pid).children(recursive=True)
        with closing(VllmApi(url, secret=secret, timeout_s=10)) as api:
            assert api.version().startswith("0.32")
            assert api.model_names() == ["policy"]
            assert api.weight_version() is None  # of no version before the first was handed to it
        with closing(VllmApi(url, secret=None, timeout_s=10)) as api, pytest.raises(ServerError, match="HTTP 401"):
            api.pause()
        for one in (psutil.Process(process.pid), *started):
            assert secret.text not in f"{one.environ()} {one.cmdline()}"
        assert secret.text not in log.read_text(errors="replace")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
        assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait()
