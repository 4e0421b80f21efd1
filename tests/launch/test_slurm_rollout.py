"""A Slurm job with rollout nodes: its servers are started, watched and ended with it, with fakes of Slurm."""

import json
import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fake_slurm import make_cluster, run_script
from selection import slow
from test_slurm import VLLM, directives, message, script
from waiting import free_port

# Stands in for `cohort train`: rank 0 waits for all servers, as the trainer does.
WAITING_PROBE = """
import json, os, pathlib, sys, time

folder = pathlib.Path(os.environ["PROBE_DIR"])
while len(list((folder / "servers").iterdir())) < 4:
    time.sleep(0.1)
(folder / "found" / os.environ["RANK"]).write_text(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ.get("TRAINING_ENDS_WITH", 0)))
"""


# Stands in for `cohort train` on a machine with four GPUs: how they are split.
SPLITTING_PROBE = """
import json, os, pathlib, sys
import torch
from cohort.config import load_config
from cohort.rollout.engines.servers.placement import split_machine

assert sys.argv[1] == "train"
torch.cuda.device_count = lambda: 4
config = load_config(sys.argv[2], sys.argv[3:])
split = split_machine(config)
record = {"train": split.training_gpus, "sample": split.server_gpus, "restarts": config.hardware.max_restarts}
pathlib.Path(os.environ["PROBE_DIR"], "found", "split").write_text(json.dumps(record))
sys.exit(int(os.environ.get("TRAINING_ENDS_WITH", 0)))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (tmp_path / "probe.py").write_text(WAITING_PROBE)
    return make_cluster(tmp_path, monkeypatch)


@pytest.fixture
def rollout_script(cluster, monkeypatch) -> str:
    """Of a job with two training nodes and two with two servers each, of two GPUs; `cohort` is the fake."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-4]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    overrides = ("run.dir=runs/a", VLLM, "rollout.tensor_parallel=2", "data.system_prompt=it's")
    options = {"nodes": 2, "rollout_nodes": 2, "gpus_per_node": 4, "max_restarts": 0, "port": free_port()}
    text = script(*overrides, config_path="run.yaml", **options)
    assert (
        text.count("--nproc-per-node 4") == text.count("-m cohort train") == text.count("python3 -m cohort serve") == 1
    )
    text = text.replace("--nproc-per-node 4", "--nproc-per-node 1").replace("-m cohort train", "-m probe")
    text = text.replace("python3 -m cohort serve", f"{cluster / 'tools' / 'cohort'} serve")
    return text.replace("sleep 10", "sleep 0.2")


def still_running(cluster: Path) -> list[psutil.Process]:
    """Processes of the job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PROBE_DIR") == str(cluster) and process.pid != os.getpid():
                found.append(process)
    return found


@slow("launchers, ranks and servers; test_slurm reads the script")
def test_it_starts_servers_on_the_last_nodes_and_ends_them(cluster, rollout_script):
    result = run_script(rollout_script)
    assert result.returncode == 0, result.stdout
    serving = ["serve", str(cluster / "run.yaml"), "run.dir=runs/a", VLLM, "rollout.tensor_parallel=2"]
    secret_file = f'rollout.secret_file="{cluster}/runs/a/.secret"'
    serving += ["data.system_prompt=it's", secret_file, "--host", "0.0.0.0", "--port"]
    found = {p.name: p.read_text().splitlines() for p in (cluster / "servers").iterdir()}
    assert found == {
        f"{node}-{port}": ["node3,node4", gpus, *serving, str(port)]
        for node in (0, 1)
        for port, gpus in ((8000, "0,1"), (8001, "2,3"))
    }
    starts = {p.stem: len(p.read_text().splitlines()) for p in cluster.glob("*.starts")}
    assert starts == {"0-8000": 2, "0-8001": 1, "1-8000": 1, "1-8001": 1}  # one failed, and was started again
    urls = ",".join(f"http://{node}:{port}" for node in ("node3", "node4") for port in (8000, 8001))
    ranks = [json.loads(p.read_text()) for p in (cluster / "found").iterdir()]
    assert len(ranks) == 2
    assert all(words[-3:] == ["rollout.tensor_parallel=1", secret_file, f"rollout.urls=[{urls}]"] for words in ranks)
    (line,) = set((cluster / "secrets").read_text().splitlines())  # of all servers
    mode, secret = line.split(" ")
    assert mode == "600" and len(bytes.fromhex(secret)) == 16
    assert secret not in result.stdout and not (cluster / "runs/a/.secret").exists()
    assert not still_running(cluster)


@slow("launchers, ranks and servers; test_slurm reads the script")
def test_the_job_ends_as_training_does(cluster, rollout_script, monkeypatch):
    monkeypatch.setenv("TRAINING_ENDS_WITH", "3")
    assert run_script(rollout_script).returncode == 1  # torchrun's, of a rank that failed


def test_the_job_ends_where_a_server_cannot_be_started(cluster, rollout_script, monkeypatch):
    monkeypatch.setenv("SERVE_FAILS", "2")
    assert run_script(rollout_script).returncode == 2
    assert list((cluster / "found").iterdir()) == []


@pytest.mark.parametrize(
    ("rollout_gpus", "train", "sample"),
    [
        ("1", [0, 1, 2], [[3]]),
        pytest.param("shared", [0, 1, 2, 3], [[0], [1], [2], [3]], marks=slow("another way to split the same node")),
    ],
)
def test_one_node_is_split_by_the_run_itself(cluster, monkeypatch, rollout_gpus, train, sample):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("TRAINING_ENDS_WITH", "5")
    (cluster / "split.py").write_text(SPLITTING_PROBE)
    (cluster / "run.yaml").write_text("{model: {path: m}, data: {path: d.jsonl}, rewards: [{use: math}]}")
    overrides = ("run.dir=runs/a", VLLM, f"hardware.rollout_gpus={rollout_gpus}")
    text = script(*overrides, config_path="run.yaml", nodes=1, gpus_per_node=4, max_restarts=2)
    assert "# Nodes: 1, with 4 GPUs, which `cohort train` splits between training and servers." in text
    assert {"--nodes=1", "--gpus-per-node=4", "--signal=USR1@120"} <= set(directives(text))
    assert "torchrun" not in text and text.count("python3 -m cohort train ") == 1
    result = run_script(text.replace("-m cohort train ", f"{cluster / 'split.py'} train "))
    assert result.returncode == 5, result.stdout  # which is told to Slurm
    found = json.loads((cluster / "found" / "split").read_text())
    assert found == {"train": train, "sample": sample, "restarts": 2}


def test_the_engine_is_said_to_servers_and_ranks():
    """`auto` on rollout nodes is vllm, and on one node what the run finds there."""
    text = script("rollout.engine=auto", rollout_nodes=1)
    assert text.count("rollout.engine=vllm") == 2
    assert "torchrun" not in script("rollout.engine=auto", nodes=1)
    assert "rollout.engine=local)" in script("rollout.engine=auto", nodes=2)
    beside = script("rollout.engine=auto", "hardware.rollout_gpus=1", nodes=2)
    assert beside.count("rollout.engine=vllm") == 2
    assert "torchrun" in script("rollout.engine=local", nodes=1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((VLLM, "hardware.processes=8"), "hardware.processes: 8 exceeds the machine's 4 GPUs"),
        ((VLLM, "hardware.rollout_gpus=4"), "hardware.rollout_gpus: 4 of 4 GPUs leaves none to train"),
        ((VLLM, "rollout.tensor_parallel=8"), "rollout.tensor_parallel: 8 on 4 GPUs leaves none to train"),
        (("rollout.engine=auto", "hardware.processes=5"), "hardware.processes: 5 exceeds the machine's 4 GPUs"),
        (
            ("rollout.engine=auto", "model={path: m, adapter: {dora: true}}", "hardware.processes=5"),
            "hardware.processes: 5 exceeds the machine's 4 GPUs",
        ),
    ],
)
def test_numbers_that_one_node_does_not_have(overrides, expected):
    assert message(*overrides, nodes=1, gpus_per_node=4).startswith(expected)
