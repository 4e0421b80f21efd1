"""A run on two nodes: two torchrun agents with host names of their own, and one node's reward workers killed."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from cohort.config import load_config
from cohort.launch import train
from commands import ENVIRONMENT, set_up
from runs import metric, weights
from selection import slow
from waiting import PATIENCE_S, free_port

KILLER = '''
import socket
from pathlib import Path

import psutil


def kill_workers(completions, **columns):
    """Kill the processes that grade answers for the ranks of one node, at every group."""
    for child in psutil.Process().children(recursive=True) if socket.gethostname() == "node-1" else ():
        if child.status() != "zombie" and any("math_worker" in word for word in child.cmdline()):
            child.kill()
            with (Path(__file__).parent / "killed").open("a") as file:
                file.write(f"{child.pid}\\n")
    return [1.0] * len(completions)
'''


def start_node(path: Path, number: int, port: int) -> subprocess.Popen[str]:
    """Start the two ranks of a node, in a group of processes and with a host name of their own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
    where = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    named = ["unshare", "--uts", "sh", "-c", f'hostname node-{number} && exec "$@"', "sh"]
    return subprocess.Popen(
        [*named, *torchrun, *where, "-m", "cohort", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )


@slow("four ranks; the tests of rewards by group kill the workers of one rank of three")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give processes a host name")
def test_killing_the_reward_workers_of_one_node_loses_nothing(tmp_path: Path):
    killer = {"use": str(tmp_path / "killer.py:kill_workers"), "weight": 0, "per_group": True}
    path = set_up(
        tmp_path,
        files={"killer.py": KILLER},
        model={"dtype": "float64"},
        rewards=[{"use": "math"}, killer],
        rollout={"num_generations": 8},
        train={"prompts_per_step": 6},
    )
    port = free_port()
    nodes = [start_node(path, number, port) for number in range(2)]
    try:
        said = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n\n".join(said)
    killed = (tmp_path / "killed").read_text().split()
    assert len(killed) >= 3  # in every step but the first, before which there are none

    run = tmp_path / "run"
    (tmp_path / "killer.py").write_text(KILLER.replace("node-1", "no such node"))
    one = train(load_config(path, [f"run.dir={tmp_path / 'one'}"])).run_dir
    for step in (1, 2, 3):
        tables = [pq.read_table(folder / "completions" / f"step-{step:06d}.parquet") for folder in (run, one)]
        for column in ("prompt_id", "completion_token_ids", "reward", "advantage"):
            assert tables[0][column].to_pylist() == tables[1][column].to_pylist(), (step, column)
    assert max(metric(run, "reward")) > 0
    assert metric(run, "processes") == [4] * 3
    for name, weight in weights(run / "final").items():
        torch.testing.assert_close(weight, weights(one / "final")[name], rtol=1e-5, atol=1e-7)
