"""A real server in a test, and what it samples. Independent of Cohort's own client for generation."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
import torch

from cohort.models.saving import stream_weights, weight_specs
from cohort.records import TrainSequence
from cohort.rollout.engines.servers.channels import send_to_servers
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret, request_headers
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import ServerOptions, ServerProcess, server_command
from cohort.rollout.engines.vllm.weight_channel import WeightChannel
from tiny import VOCAB_SIZE, make_model, naive_logprobs, policy_of, save_model_folder
from waiting import until

START_TIMEOUT_S = 300
SECRET = Secret("0123456789abcdef" * 2, mutual=True)  # of the tests' own servers
AS_ON_GPUS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # vLLM's own processes, which Cohort turns off on CPUs
HEADERS = request_headers(SECRET)
MAX_MODEL_LEN = 1024
LONG_PROMPT = 300  # more than two of the blocks of 128 tokens in which vLLM caches prompts on CPU
SIZES = {"head_dim": 32, "hidden_size": 64, "max_position_embeddings": MAX_MODEL_LEN}  # vLLM's kernels want 32


def serving_model(*, tie: bool, seed: int = 0) -> Any:
    return make_model("qwen3", tie=tie, seed=seed, **SIZES)


def serving_folder(path: Path, *, tie: bool) -> Path:
    return save_model_folder(path, "qwen3", tie=tie, **SIZES)


def options_for(python: str, folder: Path, **overrides: Any) -> ServerOptions:
    settings: dict[str, Any] = {
        "python": python,
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "extra": {"kv_cache_memory_bytes": 64 << 20},
    }
    return ServerOptions(**{**settings, **overrides})


def start(process: ServerProcess) -> float:
    """Start, and wait until it answers; the seconds that took."""
    began = time.monotonic()
    process.start()
    until(lambda: process.poll() is not None or healthy(process.url), timeout_s=START_TIMEOUT_S, every_s=0.1)
    assert process.poll() is None, process.log()[-4000:]
    return time.monotonic() - began


def serve(
    folder: Path, python: str, *, tie: bool, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator["Server"]:
    """A server of a tiny model, with more variables in its environment than Cohort sets."""
    settings = options_for(python, serving_folder(folder, tie=tie), **options)
    process = ServerProcess(settings, secret=SECRET, log_file=folder / "server.log")

    def command(*arguments: Any) -> tuple[list[str], dict[str, str]]:
        words, variables = server_command(*arguments)
        return words, {**variables, **(environment or {})}

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cohort.rollout.engines.vllm.server.server_command", command)
            start(process)
        server = Server(process=process, tie=tie)
        yield server
        server.close()
    finally:
        process.stop()


def healthy(url: str, secret: Secret = SECRET) -> bool:
    """Whether a server answers now, and its engine is alive."""
    try:
        return httpx.get(f"{url}/health", headers=request_headers(secret), timeout=2, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def models(url: str) -> list[str]:
    """The names that requests can give as `model`: the served model's, and those of loaded adapters."""
    return [model["id"] for model in httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=10).json()["data"]]


def num_running(url: str) -> int:
    """Completions that are being sampled now."""
    lines = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=20).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")))


def secret_file(folder: Path) -> str:
    """A file with the secret of the tests, as `rollout.secret_file` has it."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRET.text)
    return str(file)


def processes_of(log_file: Path) -> list[psutil.Process]:
    """All processes that have a server's log open: its guard, itself, its engine."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(os.path.samefile(f"/proc/{process.pid}/fd/{n}", log_file) for n in (1, 2)):
                found.append(process)
        except OSError:
            pass  # gone, or someone else's
    return found


def engine_of(log_file: Path) -> psutil.Process:
    """The process that computes."""
    (engine,) = (process for process in processes_of(log_file) if "EngineCore" in process.name())
    return engine


@contextmanager
def slow_steps(engine: psutil.Process) -> Iterator[None]:
    """Let an engine compute a fifth of the time: on a busy machine a tiny model's completions are done before a test
    has seen that they were begun."""
    done = threading.Event()

    def hold_up() -> None:
        while not done.is_set():
            engine.suspend()
            time.sleep(0.02)
            engine.resume()
            time.sleep(0.005)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A completion as the server gives it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[str, int, int]]  # (version, start, end)


@dataclass(kw_only=True)
class Server:
    """One server of the tests, and the trainer's end of it."""

    process: ServerProcess
    tie: bool
    api: VllmApi = field(init=False)
    channel: Any = field(init=False)

    def __post_init__(self) -> None:
        self.channel = None
        self.connect()

    def connect(self, *, timeout_s: float = 20) -> None:
        """Anew, as after a restart of the server or the trainer."""
        if self.channel is not None:
            self.close()
        self.api = VllmApi(self.process.url, secret=SECRET, timeout_s=timeout_s)
        self.channel = WeightChannel(
            self.api.url,
            secret=SECRET,
            device=torch.device("cpu"),
            num_workers=self.api.world_size(),
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self.channel.close()
        self.api.close()

    def publish(self, model: Any, version: int) -> None:
        policy = policy_of(model)
        specs = weight_specs(policy, torch.float32)
        for error in send_to_servers([self.channel], stream_weights(policy, torch.float32), specs, version).values():
            raise error

    def generate(self, prompt: list[int], **sampling: Any) -> list[Choice]:
        return generate(self.process.url, prompt, **sampling)

    def assert_serves(self, model: Any, version: int | None) -> None:
        """Logprobs of two completions, of a short prompt and a long one, are the model's own."""
        for length in (5, LONG_PROMPT):
            prompt = random_prompt(length)
            for choice in self.generate(prompt, n=2, max_tokens=12, seed=3):
                assert largest_difference(model, prompt, choice) < 1e-4
                if version is not None:
                    assert choice.versions == [(str(version), 0, 12)]


def send(channel: WeightChannel, name: str, tensor: torch.Tensor) -> None:
    """One tensor of an update, and wait until it is there."""
    channel.post(name, tensor)
    channel.flush()


def generate(url: str, prompt: list[int], *, timeout_s: float = 120, model: str = "policy", **sampling: Any) -> Any:
    body = {
        "token_ids": prompt,
        "model": model,
        "sampling_params": {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, **sampling},
    }
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers=HEADERS, timeout=timeout_s)
    if answer.status_code != 200:
        raise ServerError(answer.text)
    return [
        Choice(
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            finish_reason=choice["finish_reason"],
            versions=[(str(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]],
        )
        for choice in answer.json()["choices"]
    ]


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).tolist()


def largest_difference(model: Any, prompt: list[int], choice: Choice, tokens: slice = slice(None)) -> float:
    """Between the server's logprobs and the model's, in nats, over some of the completion's tokens."""
    sequence = TrainSequence.single_turn(np.array(prompt), np.array(choice.token_ids), index=0, group=0)
    with torch.no_grad():
        own, _ = naive_logprobs(model, sequence)
    return float((own - torch.tensor(choice.logprobs))[tokens].abs().max())
