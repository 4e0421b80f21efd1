"""Whole runs that sample with a real vLLM server on the CPU: the demo's model and problems, eight generations."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import Tensor

import cohort
from cohort.config import config_from_dict
from cohort.demo import run as demo
from cohort.demo import word_problems
from cohort.errors import TrainingError
from cohort.models import Policy, stream_weights
from cohort.rollout.engines.servers import server_engine
from cohort.trainer import worker
from cohort.trainer.inputs import build_inputs
from cohort.trainer.setup import open_engine
from selection import slow
from serving import SECRET, engine_of, processes_of, secret_file, start
from waiting import until

STEPS, PROMPTS, GENERATIONS = 16, 16, 8
# The engines draw from other random streams. Four seeds of the local engine end at 0.84 to 0.88, with a standard
# deviation of 0.02; before training it is 0.21.
ACCURACY_DISTANCE = 0.1
DELAY_S = 2.0  # far above what training takes


def run_config(folder: Path) -> dict[str, Any]:
    """A short run of the demo's task, in `folder`, with the local engine."""
    folder.mkdir(exist_ok=True)
    raw = demo.demo_config(folder / "run", seed=0).model_dump(mode="json")
    for name, number, split in (("data", 2048, "train"), ("eval", 128, "heldout")):
        raw[name]["path"] = str(folder / f"{split}.jsonl")
        word_problems.write_jsonl(Path(raw[name]["path"]), word_problems.generate(0, number, split=split))
    raw["rollout"]["num_generations"] = GENERATIONS
    raw["train"] |= {"steps": STEPS, "prompts_per_step": PROMPTS}
    raw["eval"]["every"] = 0
    raw["hardware"] |= {"device": "cpu", "timeout_s": 120.0}
    raw["run"]["checkpoint_every"] = 0
    raw["run"]["keep_checkpoints"] = 3
    return raw


@pytest.fixture
def config(tmp_path: Path, vllm_python: str) -> dict[str, Any]:
    """The run with a vLLM server of its own."""
    raw = run_config(tmp_path)
    raw["rollout"] |= {"engine": "vllm", "vllm_python": vllm_python}
    return raw


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[dict[str, Any]]:
    """The keys of a server for several runs, one after the other."""
    folder = tmp_path_factory.mktemp("server")
    raw = run_config(folder)
    raw["rollout"] |= {"engine": "vllm", "vllm_python": vllm_python, "secret_file": secret_file(folder)}
    config = config_from_dict(raw)
    setup = open_engine(config, build_inputs(config))
    assert setup.placement is not None
    process = setup.make_server(setup.placement.gpus[0], folder / "server.log")
    try:
        start(process)
        yield {"urls": [process.url], "secret_file": config.rollout.secret_file}
    finally:
        process.stop()


@pytest.fixture(scope="module")
def local_accuracy(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> float:
    """Of the same run with the local engine."""
    summary = cohort.train(run_config(tmp_path_factory.mktemp("local"))).summary
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.4
    return float(summary["accuracy_after"])


def steps_of(run: Path) -> list[dict[str, float]]:
    """The metrics of each step until now."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in map(json.loads, (line for line in lines if line.endswith("\n"))) if "loss" in line]


def check_completions(run: Path, steps: int) -> None:
    """Every step has all completions of its prompts, each prompt once in the epoch."""
    visits: Counter[int] = Counter()
    for step in range(1, steps + 1):
        rows = pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()
        of_prompt = Counter(row["prompt_id"] for row in rows)
        assert set(of_prompt.values()) == {GENERATIONS} and len(of_prompt) == PROMPTS
        visits.update(of_prompt.keys())
    assert set(visits.values()) == {1}


def test_three_processes_and_a_server_that_is_killed_learn_as_the_local_engine_does(
    tmp_path: Path, config: dict[str, Any], local_accuracy: float
):
    config["hardware"]["processes"] = 3
    config["rollout"]["workers"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = Path(config["run"]["dir"])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "cohort", "train", str(tmp_path / "config.yaml")],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        until(lambda: process.poll() is not None or len(steps_of(run)) >= 4, timeout_s=300, every_s=0.2)
        assert process.poll() is None, (tmp_path / "said").read_text()
        log = run / "logs" / "vllm-0.log"
        assert len(processes_of(log)) >= 2, "the guard and the server, by which those that are left behind are found"
        engine_of(log).send_signal(signal.SIGKILL)
        assert process.wait(400) == 0, (tmp_path / "said").read_text()
    finally:
        for left in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            left.kill()
        process.kill()
    text = (tmp_path / "said").read_text()
    assert "restarting in" in text and "parity: " in text and "trajectories run in 2 processes" in text
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_after"] == pytest.approx(local_accuracy, abs=ACCURACY_DISTANCE)
    check_completions(run, STEPS)
    assert all(
        step["processes"] == 3 and step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps_of(run)
    )
    assert not processes_of(log)


def test_weights_that_were_tampered_with_stop_the_run(
    tmp_path: Path, elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def tampered(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        updates.append(1)
        for name, tensor in stream_weights(policy, dtype):
            yield name, tensor * 1.05 if len(updates) == 3 and name.endswith("0.mlp.down_proj.weight") else tensor

    updates: list[int] = []
    monkeypatch.setattr(worker, "stream_weights", tampered)
    config = run_config(tmp_path) | {"eval": None}
    config["rollout"] |= elsewhere | {"engine": "vllm", "parity_every": 1}
    with pytest.raises(TrainingError, match=r"after step 2 the logprobs of http.* differ .* by 0\.\d+ nats on average"):
        cohort.train(config)
    run = Path(config["run"]["dir"])
    first, *_ = steps_of(run)
    assert 0 < first["sampling/parity/mean"] < 1e-5  # weights that are right pass the same gate
    assert not [file for file in run.rglob("*") if file.is_file() and SECRET.text.encode() in file.read_bytes()]


@slow("it takes the time of two runs, of which one has to be quicker")
def test_sampling_ahead_learns_as_much_in_less_time(
    tmp_path: Path, elsewhere: dict[str, Any], local_accuracy: float, monkeypatch: pytest.MonkeyPatch
):
    """Sampling is made slow, so that training overtakes it: completions are of older weights, and corrected."""

    def slow(calls: Any, future: Any) -> None:
        threading.Timer(DELAY_S if calls[0].key.purpose == "train" else 0, answer, (calls, future)).start()

    answer = server_engine._answer_soon
    monkeypatch.setattr(server_engine, "_answer_soon", slow)
    seconds = {}
    for max_staleness in (0, 1):
        config = run_config(tmp_path / f"{max_staleness}")
        config["rollout"] |= elsewhere | {"engine": "vllm", "max_staleness": max_staleness}
        result = cohort.train(config)
        steps = steps_of(result.run_dir)
        seconds[max_staleness] = sum(step["step_time"] for step in steps[2:])  # without those that get it going
        assert result.summary["accuracy_after"] == pytest.approx(local_accuracy, abs=ACCURACY_DISTANCE)
        check_completions(result.run_dir, STEPS)
        staleness = [step["rollout/staleness_max"] for step in steps]
        assert min(staleness[1:]) >= 1 if max_staleness else max(staleness) == 0
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) > 1e-3
    # the delay of one step and of the next pass at the same time: at the best it is half
    assert seconds[1] <= 0.9 * seconds[0]


@slow("another server; the benchmark's other scripts are run without one")
def test_the_benchmark_runs(vllm_python: str):
    script = Path(__file__).parents[2] / "bench" / "vllm_servers.py"
    environment = {**os.environ, "COHORT_VLLM_PYTHON": vllm_python}
    out = subprocess.run([sys.executable, str(script), "--quick"], env=environment, capture_output=True, text=True)
    assert out.returncode == 0 and "| 4M | 16 | " in out.stdout, out.stdout + out.stderr


@slow("another server")
def test_the_part_of_a_server_in_the_gpu_script(tmp_path: Path, vllm_python: str):
    script = Path(__file__).parents[2] / "bench" / "gpu.sh"
    environment = {**os.environ, "COHORT_VLLM_PYTHON": vllm_python, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", str(script), "quick", "--tiny", "--only", "vLLM"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert out.returncode == 0 and "| vLLM, weights 2: server and trainer | " in out.stdout, out.stdout + out.stderr
