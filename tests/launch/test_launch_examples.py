"""The files of examples/launch: what they start, and that their jobs save in time."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from cohort.config import Config, config_from_dict
from cohort.config.hardware import HardwareConfig
from cohort.ranks.stopping import LAUNCHER_GRACE_S
from cohort.run.files import checkpoints
from commands import ENVIRONMENT, set_up
from runs import metric
from selection import slow
from waiting import PATIENCE_S, free_port, num_lines, until

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
RAW = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}


def kubernetes() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return {f"{document['kind']} {document['metadata']['name']}": document for document in documents}


def words_of(pod: dict[str, Any]) -> list[str]:
    """The command line of a pod."""
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"]
    return shlex.split(container["args"][0])


def config_of(words: list[str]) -> Config:
    """The configuration of `cohort train` or `serve` with some file."""
    return config_from_dict(RAW, [word for word in words if "=" in word and not word.startswith("-")])


def test_the_pods_of_kubernetes_fit_together():
    found = kubernetes()
    job, servers = found["Job cohort"]["spec"], found["StatefulSet vllm"]["spec"]
    pod = job["template"]["spec"]
    words = words_of(pod)
    assert words[:4] == ["exec", "python", "-m", "cohort.launch.torchrun"]
    options = parse_args([word.replace("$JOB_COMPLETION_INDEX", "0") for word in words[4:]])
    assert int(options.nnodes) == job["completions"] == job["parallelism"]
    assert int(options.nproc_per_node) == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert options.master_addr == f"cohort-0.{pod['subdomain']}" and f"Service {pod['subdomain']}" in found
    assert (options.training_script, options.training_script_args[:2]) == ("cohort", ["train", "/shared/run.yaml"])
    rollout = config_of(options.training_script_args).rollout
    assert rollout.uses_servers
    names = [f"vllm-{i}.{servers['serviceName']}" for i in range(servers["replicas"])]
    assert list(rollout.urls) == [f"http://{name}:8000" for name in names]
    serving = words_of(servers["template"]["spec"])
    assert serving[:6] == ["exec", "python", "-m", "cohort", "serve", "/shared/run.yaml"] and serving[-1] == "8000"
    assert config_of(serving).rollout.secret_file == rollout.secret_file


def test_a_pod_has_time_to_save():
    pod = kubernetes()["Job cohort"]["spec"]["template"]["spec"]
    (shutdown,) = pod["containers"][0]["env"]
    assert shutdown == {
        "name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "value": str(int(HardwareConfig().grace_s) + LAUNCHER_GRACE_S),
    }
    assert pod["terminationGracePeriodSeconds"] >= int(shutdown["value"]) + 20


@pytest.mark.extras
def test_kubernetes_knows_every_field():
    validator = pytest.importorskip("kubernetes_validate")
    for document in kubernetes().values():
        validator.validate(document, validator.latest_version(), strict=True)


def test_the_task_of_skypilot():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=True)
    words = shlex.split(task["run"].replace("$RUN_DIR", task["envs"]["RUN_DIR"]).splitlines()[-1])
    assert words[:3] == ["exec", "~/cohort/bin/cohort", "train"]
    assert config_of(words).run.dir.startswith(f"{next(iter(task['file_mounts']))}/")  # outlives the machine


@slow("two launchers with a rank each; test_slurm has what the launcher says")
def test_all_pods_save_when_one_is_drained(tmp_path: Path):
    """And exit with the code for which the Job starts them again."""
    path = set_up(tmp_path, train={"steps": 100000}, run={"checkpoint_every": 100000})
    words = words_of(kubernetes()["Job cohort"]["spec"]["template"]["spec"])
    changes = {"cohort-0.cohort": "127.0.0.1", "29500": str(free_port()), "8": "1", "/shared/run.yaml": str(path)}
    command = [sys.executable, *(changes.get(word, word) for word in words[2 : words.index("train") + 2])]
    pods = [
        subprocess.Popen(
            [word.replace("$JOB_COMPLETION_INDEX", str(index)) for word in [*command, "hardware.device=cpu"]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PET_LOCAL_ADDR": "127.0.0.1"},
        )
        for index in range(2)
    ]
    try:
        until(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") >= 2 or pods[0].poll() is not None)
        os.kill(pods[1].pid, signal.SIGTERM)
        said = [pod.communicate(timeout=PATIENCE_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    last = int(metric(tmp_path / "run", "step")[-1])
    assert [pod.returncode for pod in pods] == [143, 143], said
    assert f"stopped by SIGTERM after step {last}: saved" in said[0]
    assert "Traceback" not in "".join(said)
    assert [int(folder.name.removeprefix("step-")) for folder in checkpoints(tmp_path / "run" / "checkpoints")] == [
        last
    ]
