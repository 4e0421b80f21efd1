"""Runs on two nodes: two torchrun agents with host names of their own, and one node's child processes killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from cohort.config import load_config
from cohort.launch import train
from commands import ENVIRONMENT, set_up
from runs import metric, weights
from selection import slow
from stub_engine.server import StubServer, serving
from third_engine import known_engine
from tiny import make_tokenizer
from waiting import PATIENCE_S, free_port, is_running, until

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

PROGRAM = """
import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil

FOLDER = Path(__file__).parent

async def run(row, model):
    first = await model.generate(model.tokenizer(row["question"])["input_ids"])
    with (FOLDER / "workers").open("a") as file:
        file.write(f"{socket.gethostname()} {os.getpid()} {os.getppid()}\\n")
    if socket.gethostname() == "node-1" and (FOLDER / "kill").exists():
        (FOLDER / "kill").unlink()
        for worker in sorted(psutil.Process(os.getppid()).children(), key=lambda child: child.pid == os.getpid()):
            worker.kill()  # this one at the end
    if (FOLDER / "hold").exists():
        await asyncio.sleep(1000)
    second = await model.generate([*first.context_ids, *first.token_ids])
    return {"reward": float(second.token_ids.sum() % 3)}
"""


def start_node(number: int, port: int, *command: str) -> subprocess.Popen[str]:
    """Start the two ranks of a node, in a group of processes and with a host name of their own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
    where = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    named = ["unshare", "--uts", "sh", "-c", f'hostname node-{number} && exec "$@"', "sh"]
    return subprocess.Popen(
        [*named, *torchrun, *where, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )


def said_by_nodes(*command: str) -> list[str]:
    """What both nodes of a run print, which ends well."""
    port = free_port()
    nodes = [start_node(number, port, *command) for number in range(2)]
    try:
        said = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n\n".join(said)
    return said


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
    said_by_nodes("-m", "cohort", "train", str(path))
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


@contextmanager
def two_servers() -> Iterator[list[StubServer]]:
    """Two stub servers, whose addresses are not taken for those of one node alone."""
    with serving(len(make_tokenizer())) as one, serving(len(make_tokenizer())) as other:
        yield [one, other]


def rollout_run(folder: Path, servers: list[StubServer], **rollout: Any) -> Path:
    """A run whose trajectories are those of a program, in two processes on each node."""
    return set_up(
        folder,
        files={"program.py": PROGRAM},
        model={"dtype": "float64"},
        rollout={
            "engine": "stub",
            "urls": [f"http://127.1:{server.server_port}" for server in servers],
            "environment": f"{folder}/program.py:run",
            "max_turns": 2,
            "num_generations": 4,
            "parity_every": 0,
            "workers": 2,
            **rollout,
        },
        rewards=[],
        train={"prompts_per_step": 6},
        hardware={"timeout_s": 120},  # rank 0 notices the end of another node within a quarter of it
    )


def workers_by_node(folder: Path) -> dict[str, set[tuple[int, int]]]:
    """Process ids of the rollout workers and of their parents that have written their names."""
    by_node: dict[str, set[tuple[int, int]]] = {"node-0": set(), "node-1": set()}
    for line in (folder / "workers").read_text().splitlines() if (folder / "workers").exists() else ():
        node, *pids = line.split()
        by_node[node].add((int(pids[0]), int(pids[1])))
    return by_node


STUB_RANK = str(Path(__file__).parents[1] / "helpers" / "stub_rank.py")


@slow("four ranks; the workers of another node are tested without any")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give processes a host name")
def test_killing_the_rollout_workers_of_one_node_loses_nothing(tmp_path: Path):
    with known_engine(), two_servers() as servers:
        path = rollout_run(tmp_path, servers)
        (tmp_path / "kill").touch()
        said = said_by_nodes(STUB_RANK, str(path))
        assert "trajectories run in 4 processes on 2 nodes, 2 each (rollout.workers)" in said[0]
        assert not (tmp_path / "kill").exists()
        assert sum(metric(tmp_path / "run", "rollout/lost_workers")) == 2
        assert said[0].count("a rollout worker on node-1 was killed by SIGKILL") == 2, said[0]
        by_node = workers_by_node(tmp_path)
        assert len(by_node["node-0"]) == 2
        assert len(by_node["node-1"]) >= 3  # one that was killed, perhaps before the other had written, and two more
        assert not any(is_running(pid) for pids in by_node.values() for pair in pids for pid in pair)
        assert all(server.sampled_versions for server in servers)

        one = train(load_config(path, [f"run.dir={tmp_path / 'one'}", "rollout.workers=1"])).run_dir
    for step in (1, 2, 3):
        tables = [
            pq.read_table(folder / "completions" / f"step-{step:06d}.parquet") for folder in (tmp_path / "run", one)
        ]
        for column in ("prompt_id", "completion_token_ids", "reward", "advantage"):
            assert tables[0][column].to_pylist() == tables[1][column].to_pylist(), (step, column)


@slow("four ranks; a worker whose parent is killed is tested")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give processes a host name")
@pytest.mark.parametrize("victim", ["rank 0", "node 1", "ctrl-c"])
def test_no_rollout_worker_outlives_the_ranks(tmp_path: Path, victim: str):
    with two_servers() as servers:
        path, port = rollout_run(tmp_path, servers), free_port()
        (tmp_path / "hold").touch()
        nodes = [start_node(number, port, STUB_RANK, str(path)) for number in range(2)]
        try:
            until(lambda: all(len(pids) == 2 for pids in workers_by_node(tmp_path).values()))
            by_node = workers_by_node(tmp_path)
            parents = {node: min(parent for _, parent in pids) for node, pids in by_node.items()}
            if victim == "ctrl-c":
                for node in nodes:
                    node.send_signal(signal.SIGINT)
            else:
                first = parents["node-0"] if victim == "rank 0" else psutil.Process(parents["node-1"]).ppid()
                os.kill(first, signal.SIGKILL)
            until(lambda: not any(is_running(pid) for pids in by_node.values() for pair in pids for pid in pair))
            for node in nodes:
                node.communicate(timeout=PATIENCE_S)
        finally:
            for node in nodes:
                node.kill()
