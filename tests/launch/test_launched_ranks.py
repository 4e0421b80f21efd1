"""Processes that a launcher starts, known by their environment alone: how they meet, or why they cannot."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from cohort.config import load_config
from cohort.launch import train
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import load_trainer_state
from commands import ENVIRONMENT, Ended, assert_refused, set_up
from forked import fork, run_module
from runs import metric, weights
from selection import slow
from waiting import free_port, until


class LaunchedRank:
    """`python -m cohort train` as torchrun starts it on this machine."""

    def __init__(self, path: Path, **environment: object) -> None:
        self._out, self._err = (path.with_name(f"rank-{environment['RANK']}.{name}") for name in ("out", "err"))
        self._process = fork(
            run_module,
            *("cohort", "train", str(path)),
            out=self._out,
            err=self._err,
            OMP_NUM_THREADS=1,
            MASTER_ADDR="127.0.0.1",
            **environment,
        )

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def end(self) -> Ended:
        """How it ends. It never outlives this."""
        try:
            until(lambda: not self._process.is_alive())
        finally:
            self._process.kill()
        err = self._err.read_text()
        # torch may have had a say before; what counts is that our message is the last
        return Ended(code=self._process.exitcode, out=self._out.read_text(), err=err[max(0, err.rfind("error: ")) :])


@slow("a fresh interpreter; the ranks of test_launch are started so")
def test_one_process_of_a_launcher_is_an_ordinary_run(tmp_path):
    path = set_up(tmp_path)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "cohort", "train", str(path)],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **place, "MASTER_PORT": str(free_port())},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


@slow("test_resume kills one process, and test_stopping stops the ranks of a run")
def test_three_ranks_one_of_which_is_killed_go_on_to_the_run_of_one_process(tmp_path):
    """SIGKILL after a checkpoint: the others end and say so, and the same command goes on from there."""
    sections = {"model": {"dtype": "float64"}, "run": {"checkpoint_every": 1, "record_tokens": True}}

    def start(steps: int) -> list[LaunchedRank]:
        path = set_up(tmp_path, train={"steps": steps}, **sections)
        place = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": free_port()}
        return [LaunchedRank(path, RANK=rank, LOCAL_RANK=rank, **place) for rank in range(3)]

    first, run = start(100_000), tmp_path / "run"
    until(lambda: ((run / "checkpoints").exists() and checkpoints(run / "checkpoints")) or not first[0].is_alive())
    first[1].kill()
    for rank in (0, 2):
        ended = first[rank].end()
        assert (ended.code, ended.err.count("Traceback")) == (1, 0), ended.err
        absent = re.search(r"PeerError: .*ranks \[([\d, ]+)\] did not answer", ended.err)
        assert absent and "1" in absent[1].split(", "), ended.err  # and another one that has noticed it first
    steps = load_trainer_state(checkpoints(run / "checkpoints")[-1]).steps_done + 2
    for ended in [rank.end() for rank in start(steps)]:
        assert ended.code == 0, ended.err
    one = train(load_config(tmp_path / "run.yaml", [f"run.dir={tmp_path / 'one'}"])).run_dir
    for step in range(1, steps + 1):
        tables = [pq.read_table(folder / "completions" / f"step-{step:06d}.parquet") for folder in (run, one)]
        for column in ("prompt_id", "completion_token_ids", "reward", "advantage"):
            assert tables[0][column].to_pylist() == tables[1][column].to_pylist(), (step, column)
        tokens = [pq.read_table(folder / "tokens" / f"step-{step:06d}.parquet") for folder in (run, one)]
        for column in ("logprobs", "entropies", "advantages", "loss_weights"):
            values = [of_run[column].combine_chunks().flatten() for of_run in tokens]
            assert values[0].is_null().equals(values[1].is_null())  # ranks know the tokens that they trained on
            assert values[0].drop_null().to_pylist() == pytest.approx(values[1].drop_null().to_pylist(), abs=1e-5)
    assert metric(run, "loss") == pytest.approx(metric(one, "loss"), rel=1e-6, abs=1e-9)
    assert metric(run, "processes") == [3] * steps
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event in ("start", "stop", "end")] == ["start", "stop", "start", "end"]
    for name, weight in weights(run / "final").items():
        torch.testing.assert_close(weight, weights(one / "final")[name], rtol=1e-5, atol=1e-7)


def test_a_port_that_another_program_has(tmp_path):
    path = set_up(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert_refused(
            LaunchedRank(path, RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1, MASTER_PORT=port).end(),
            f"error: MASTER_PORT: 127.0.0.1:{port} is in use by another program; use another port",
            "(torchrun --master-port)",
        )
    assert not (tmp_path / "run").exists()


def test_a_place_where_nobody_is(tmp_path):
    path, port = set_up(tmp_path, hardware={"timeout_s": 3}), free_port()
    assert_refused(
        LaunchedRank(path, RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=port).end(),
        f"error: rank 1 of 2 could not reach the rendezvous at 127.0.0.1:{port} within 3 s; check that rank 0 runs",
    )


@pytest.mark.parametrize(("first", "second"), [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 2), (2, 3))])
def test_processes_that_do_not_agree_on_their_number(tmp_path, first, second):
    path, port = set_up(tmp_path, hardware={"timeout_s": 300}), free_port()
    told = f"rank 0 on {socket.gethostname()} has WORLD_SIZE={first[1]}, rank {second[0]} on"
    processes = [
        LaunchedRank(path, RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=1, MASTER_PORT=port)
        for rank, world_size in (first, second)
    ]
    for ended in [process.end() for process in processes]:
        assert_refused(ended, f"error: ranks have different world sizes: {told}", "--nnodes")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        (
            {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
            [
                "error: hardware.processes: 3, but the launcher started 2 processes on this machine",
                "--nproc-per-node 3, or hardware.processes: auto",
            ],
        ),
        ({}, ["MASTER_ADDR or MASTER_PORT is missing or invalid ('MASTER_PORT'); start the run with torchrun"]),
        ({"MASTER_PORT": "high"}, ["MASTER_ADDR or MASTER_PORT is missing or invalid (invalid literal"]),
        ({"MASTER_PORT": "1", "RANK": "2"}, ["RANK=2 is out of range for WORLD_SIZE=2; use 0 to 1"]),
    ],
)
def test_an_environment_that_does_not_fit(tmp_path, cohort, monkeypatch, environment, parts):
    path = set_up(tmp_path, hardware={"processes": 3})
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr("cohort.launch.rank.time.sleep", lambda _: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **environment}.items():
        monkeypatch.setenv(name, value)
    assert_refused(cohort("train", path), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"hardware": {"processes": 1}},
            "hardware.processes: 1, but the launcher started 2 processes on this machine; use --nproc-per-node 1, "
            "or hardware.processes: auto",
        ),
        (
            {"optim": {"name": "adafactor"}},
            "hardware.processes: 1 (optim.name: adafactor works in one process only), but the launcher started 2 "
            "processes on this machine; use --nproc-per-node 1",
        ),
    ],
)
def test_one_process_is_not_made_several(tmp_path, cohort, monkeypatch, sections, message):
    path = set_up(tmp_path, **sections)
    monkeypatch.setattr("cohort.launch.rank.time.sleep", lambda _: None)
    ranks = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    assert cohort("train", path).err == f"error: {message}\n"
