"""An adapter travels alone, and is what a server samples with."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import cohort
from cohort.config import VllmRolloutConfig, config_from_dict
from cohort.errors import TrainingError
from cohort.models.adapters.lora import Adapter
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm import server as server_module
from cohort.rollout.engines.vllm.server import ServerProcess, server_options
from cohort.rollout.engines.vllm.weight_channel import AdapterChannel, send_adapter
from serving import (
    LONG_PROMPT,
    SECRET,
    Server,
    engine_of,
    largest_difference,
    models,
    num_running,
    options_for,
    random_prompt,
    secret_file,
    serving_folder,
    serving_model,
    slow_steps,
    start,
)
from test_runs import run_config, steps_of
from waiting import until

# A worker extension that logs every adapter that is read from disk.
LOGGING_WORKER = """
from cohort_vllm_worker import CohortWorker
from vllm.lora.worker_manager import WorkerLoRAManager

def load_and_log(self, request):
    print("ADAPTER READ", request.lora_path, flush=True)
    return load(self, request)

load, WorkerLoRAManager._load_adapter = WorkerLoRAManager._load_adapter, load_and_log

class LoggingWorker(CohortWorker):
    pass
"""

# One whose keys and values are lost when they are released, which vLLM's worker for CPUs does not support.
LOSING_WORKER = """
from cohort_vllm_worker import CohortWorker
from vllm.v1.worker.cpu_worker import CPUWorker

def lose(self, tags):
    print("RELEASED", *tags, flush=True)
    for cache in self.model_runner.kv_caches:
        cache.fill_(7.0)

def wake_up(self, tags=None):
    print("WOKEN", *tags, flush=True)

CPUWorker.discard, CPUWorker.wake_up = lose, wake_up

class LosingWorker(CohortWorker):
    pass
"""


def adapted(seed: int) -> Any:
    """The served model with a random adapter that matters."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(serving_model(tie=True), config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def test_completions_are_those_of_the_adapter_that_was_published_last(tmp_path: Path, vllm_python: str):
    folder = serving_folder(tmp_path / "model", tie=True)
    process = ServerProcess(
        options_for(vllm_python, folder, lora_rank=4), secret=SECRET, log_file=tmp_path / "server.log"
    )
    try:
        start(process)
        server = Server(process=process, tie=True)
        assert models(process.url) == ["policy-base"]
        with pytest.raises(ServerError, match="policy"):  # no adapter, no policy
            server.generate(random_prompt(5), n=1, max_tokens=2)
        channel = AdapterChannel(server.api)
        for version in (1, 2):
            model = adapted(version)
            assert send_adapter([channel], version, save=model.save_pretrained, folder=tmp_path / "adapters") == {}
            server.assert_serves(model, version)
            assert [path.name for path in (tmp_path / "adapters").iterdir()] == [f"version-{version}"]
        prompt = random_prompt(LONG_PROMPT)
        (choice,) = server.generate(prompt, n=1, max_tokens=12, seed=3)
        assert largest_difference(adapted(1), prompt, choice) > 0.1

        # an empty folder
        (error,) = send_adapter([channel], 3, save=Path.mkdir, folder=tmp_path / "adapters").values()
        assert "/collective_rpc: HTTP 500: " in str(error) and "No adapter found" in str(error)
        send_adapter([channel], 4, save=adapted(4).save_pretrained, folder=tmp_path / "adapters")
        server.assert_serves(adapted(4), 4)
        server.close()
    finally:
        process.stop()


def test_an_adapter_is_read_once_and_requests_in_flight_go_on_with_the_next_one(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "logging_worker.py").write_text(LOGGING_WORKER)
    monkeypatch.setattr(server_module, "WORKER_FOLDER", f"{server_module.WORKER_FOLDER}:{tmp_path}")
    options = options_for(vllm_python, serving_folder(tmp_path / "model", tie=True), lora_rank=4)
    extra = {**options.extra, "worker_extension_cls": "logging_worker.LoggingWorker"}
    process = ServerProcess(replace(options, extra=extra), secret=SECRET, log_file=tmp_path / "server.log")
    try:
        start(process)
        server, adapters, prompt = Server(process=process, tie=True), tmp_path / "adapters", random_prompt(LONG_PROMPT)
        channel = AdapterChannel(server.api)
        old, new = adapted(1), adapted(2)
        assert send_adapter([channel], 1, save=old.save_pretrained, folder=adapters) == {}
        server.generate(prompt, n=1, max_tokens=20)
        assert process.log().count("ADAPTER READ") == 1
        with slow_steps(engine_of(process.log_file)), ThreadPoolExecutor(1) as pool:
            request = pool.submit(server.generate, prompt, n=2, max_tokens=600, seed=1)
            until(lambda: num_running(process.url) == 2 or request.done())
            assert send_adapter([channel], 2, save=new.save_pretrained, folder=adapters) == {}
            choices = request.result()
        assert process.log().count("ADAPTER READ") == 2
        for choice in choices:
            (before, start_, change), (after, _, end) = choice.versions
            assert (before, after) == ("1", "2") and start_ == 0 < change < end == 600
            assert largest_difference(old, prompt, choice, slice(0, change)) < 1e-4
            assert largest_difference(new, prompt, choice, slice(change, 600)) < 1e-4
            assert largest_difference(old, prompt, choice, slice(change, 600)) > 0.1
        server.close()
    finally:
        process.stop()


def test_a_server_that_has_kept_its_base_serves_the_next_adapter(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
):
    """And forgets the prompts whose keys and values it has lost, also those of an adapter that has not changed."""
    (tmp_path / "losing_worker.py").write_text(LOSING_WORKER)
    monkeypatch.setattr(server_module, "WORKER_FOLDER", f"{server_module.WORKER_FOLDER}:{tmp_path}")
    options = options_for(vllm_python, serving_folder(tmp_path / "model", tie=True), lora_rank=4)
    extra = {**options.extra, "worker_extension_cls": "losing_worker.LosingWorker"}
    process = ServerProcess(replace(options, extra=extra), secret=SECRET, log_file=tmp_path / "server.log")
    try:
        start(process)
        server, adapters = Server(process=process, tie=True), tmp_path / "adapters"
        channel = AdapterChannel(server.api, keeps_base=True)
        with pytest.raises(ServerError, match=r"/release_kv_cache_memory: HTTP 500: .*requires a completed pause"):
            server.api.release_kv_cache()
        for version, seed in ((1, 1), (2, 1), (3, 2)):
            model = adapted(seed)
            assert send_adapter([channel], version, save=model.save_pretrained, folder=adapters) == {}
            server.assert_serves(model, version)
            channel.sleep()
            with pytest.raises(ServerError, match=r"/release_kv_cache_memory: HTTP 500: .*memory to be resident"):
                server.api.release_kv_cache()
        told = [line for line in process.log().splitlines() if "RELEASED" in line or "WOKEN" in line]
        assert [line.split()[-2:] for line in told] == [["RELEASED", "kv_cache"], ["WOKEN", "kv_cache"]] * 2 + [
            ["RELEASED", "kv_cache"]
        ]
        server.close()
    finally:
        process.stop()


def adapter_run(folder: Path, python: str) -> dict[str, Any]:
    """A short run of the demo's task that trains an adapter."""
    raw = run_config(folder)
    raw["model"]["adapter"] = {"rank": 8, "alpha": 16}
    raw["algorithm"] = {"name": "grpo", "beta": 0.01}
    raw["train"] |= {"steps": 3, "learning_rate": 3e-3}
    raw["rollout"] |= {"engine": "vllm", "vllm_python": python, "parity_every": 1}
    return raw


@pytest.fixture
def elsewhere(tmp_path: Path, vllm_python: str) -> Iterator[dict[str, Any]]:
    """A server as `cohort serve` starts it for such a run."""
    config = config_from_dict(adapter_run(tmp_path / "server", vllm_python))
    process = ServerProcess(server_options(config, gpus=""), secret=SECRET, log_file=tmp_path / "server.log")
    try:
        start(process)
        yield {"urls": [process.url], "secret_file": secret_file(tmp_path)}
    finally:
        process.stop()


def test_runs_of_an_adapter(
    tmp_path: Path, vllm_python: str, elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Two processes, then one whose adapter is changed on its way: the gate sees that, and only that."""
    config = adapter_run(tmp_path / "run", vllm_python)
    own = VllmRolloutConfig.managed_server_keys
    config["rollout"] = {k: v for k, v in config["rollout"].items() if k not in own} | elsewhere
    result = cohort.train(config | {"hardware": config["hardware"] | {"processes": 2}})
    steps = steps_of(result.run_dir)
    assert len(steps) == 3 and all(0 < step["sampling/parity/mean"] < 1e-5 for step in steps)
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[-1]["kl"] > 1e-4
    assert (result.final_dir / "adapter_model.safetensors").is_file()
    assert [path.name for path in (result.run_dir / "adapters").iterdir()] == ["version-3"]
    served, final = (
        load_file(f / "adapter_model.safetensors") for f in (result.run_dir / "adapters/version-3", result.final_dir)
    )
    assert served.keys() == final.keys() and all(torch.equal(served[key], final[key]) for key in final)

    def tampered(self: Adapter, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        saved.append(folder)
        save(self, folder, {k: 1.5 * t if len(saved) == 3 and "lora_B" in k else t for k, t in weights.items()})

    saved: list[Path] = []
    save = Adapter.save
    monkeypatch.setattr(Adapter, "save", tampered)
    with pytest.raises(TrainingError, match=r"after step 2 the logprobs of http.* differ"):
        cohort.train(config | {"run": config["run"] | {"dir": str(tmp_path / "tampered")}})


def test_an_adapter_trains_while_the_next_steps_are_sampled(
    tmp_path: Path, vllm_python: str, elsewhere: dict[str, Any]
):
    config = adapter_run(tmp_path / "run", vllm_python)
    own = VllmRolloutConfig.managed_server_keys
    config["rollout"] = {k: v for k, v in config["rollout"].items() if k not in own} | elsewhere | {"max_staleness": 1}
    config["train"] |= {"steps": 6}
    steps = steps_of(cohort.train(config).run_dir)
    assert len(steps) == 6 and max(step["rollout/staleness_max"] for step in steps) == 1
    assert all(0 < step["sampling/parity/mean"] < 1e-5 for step in steps)
