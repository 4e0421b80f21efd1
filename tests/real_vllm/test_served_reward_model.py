"""The reward `model` with vLLM's pooling API: the values of transformers."""

import os
import subprocess

import httpx2
import pytest
import torch

from builtin_rewards import load_builtin
from reward_models import MESSAGES, naive_scores, save_reward_model
from waiting import free_port, until

START_TIMEOUT_S = 180


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm_python):
    folder = save_reward_model(tmp_path_factory.mktemp("rm"), head_dim=32, hidden_size=64)
    port = free_port()
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--runner", "pooling", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "rm"]
    own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()[-4000:]
        try:
            return httpx2.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        until(answers, timeout_s=START_TIMEOUT_S, every_s=0.2)
        yield folder, url
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_pooling_gives_the_values_of_transformers(served):
    folder, url = served
    reward = load_builtin("model", {"url": url, "model": "rm"}, budget_s=60)
    reward.check()
    completions = [[{"role": "assistant", "content": text}] for text in ("4", "a longer answer " * 5, "?")]
    scores = reward([MESSAGES] * 3, completions)
    torch.testing.assert_close(scores, naive_scores(folder, [MESSAGES] * 3, completions), atol=1e-4, rtol=1e-4)
    assert reward.last_counts == {}


def test_the_label_must_be_one_of_the_model(served):
    with pytest.raises(ValueError, match="expected a list with output 3"):
        load_builtin("model", {"url": served[1], "label": 3}).check()
