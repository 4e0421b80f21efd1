"""The batch script for Slurm: what it says, what is refused, and that it starts the ranks, with fakes of Slurm."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cohort.config import Config, config_from_dict
from cohort.errors import UserError
from cohort.launch.slurm import SlurmOptions, slurm_script


def config_with(*overrides: str) -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}], "run": {"dir": "/runs/a"}}
    return config_from_dict(raw, overrides)


def script(*overrides: str, config_path: str = "/configs/run.yaml", **options: Any) -> str:
    return slurm_script(
        config_with(*overrides),
        config_path=Path(config_path),
        overrides=overrides,
        options=SlurmOptions(**{"nodes": 8, **options}),
    )


def message(*overrides: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        script(*overrides, **options)
    return str(caught.value)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


# What it says


def test_the_allocation():
    assert directives(script()) == [
        "--job-name=cohort",
        "--nodes=8",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--time=24:00:00",
        "--output=slurm-%x-%j.log",
        "--open-mode=append",
        "--requeue",
    ]
    named = directives(script(partition="a,b", account="team.x", job_name="run_1", time="1-12"))
    assert {"--partition=a,b", "--account=team.x", "--job-name=run_1", "--time=1-12"} <= set(named)


def test_the_header_counts_nodes_and_ranks():
    assert "# Training nodes: 8, with 4 GPUs and 4 ranks each: 32 ranks." in script(gpus_per_node=4)
    assert "# Rollout nodes: 0. rollout.engine is local: the training nodes sample" in script()


def test_the_launcher():
    assert """
launcher=(
    torchrun
    --nnodes 8:8
    --nproc-per-node 8
    --rdzv-backend c10d
    --rdzv-endpoint "$first_node:29511"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-conf join_timeout=91,read_timeout=91  # hardware.timeout_s
    --max-restarts 2
    --monitor-interval 1
)
training=(-m cohort.train "$config" hardware.timeout_s=90.5 'model.path=a b')
""" in script("hardware.timeout_s=90.5", "model.path=a b", port=29511, max_restarts=2)


def test_fewer_nodes_may_go_on():
    text = script(min_nodes=6)
    assert "    --nnodes 6:8\n" in text
    assert ",last_call_timeout=60 " in text
    assert "--no-kill" in directives(text)
    assert '\nsrun --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none "${launcher[@]}" "${training[@]}"\n' in text


def test_all_nodes_or_none():
    assert '\nsrun --kill-on-bad-exit=1 --cpu-bind=none "${launcher[@]}" "${training[@]}"\n' in script()


def test_paths_are_absolute_and_quoted(tmp_path, monkeypatch):
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = script("run.dir=runs/b", config_path="run.yaml")
    assert f"\nconfig={shlex.quote(str(folder / 'run.yaml'))}\n" in text
    assert f"\nrun_dir={shlex.quote(str(folder / 'runs/b'))}\n" in text
    assert f"\ncd {shlex.quote(str(folder))}\n" in text
    assert f"\nexport PATH={shlex.quote(str(Path(sys.executable).parent))}:" in text


@pytest.mark.parametrize(
    ("overrides", "options", "ranks", "added"),
    [
        ((), {}, 8, False),
        (("hardware.processes=auto",), {"gpus_per_node": 4}, 4, False),
        (("hardware.processes=4",), {"gpus_per_node": 4}, 4, False),
        (("hardware.processes=2",), {"gpus_per_node": 4}, 4, True),  # contradicts: the nodes' GPUs decide
        (("hardware.device=cpu",), {}, 1, False),
        (("hardware.device=cpu", "hardware.processes=3"), {}, 3, False),
        (("hardware.device=cpu", "hardware.processes=auto"), {"gpus_per_node": 0}, 1, False),
        (("hardware.processes=2",), {"gpus_per_node": 0}, 2, False),
    ],
)
def test_ranks_per_node(overrides, options, ranks, added):
    text = script(*overrides, **options)
    assert f"    --nproc-per-node {ranks}\n" in text
    training = next(line for line in text.splitlines() if line.startswith("training="))
    assert training == f"training=({' '.join(['-m cohort.train', chr(34) + '$config' + chr(34), *overrides])}" + (
        " hardware.processes=auto)" if added else ")"
    )


def test_without_gpus_none_are_asked_for():
    assert not any("gpus" in line for line in directives(script("hardware.device=cpu")))


def test_without_checkpoints_the_job_is_not_started_again():
    assert "--no-requeue" in directives(script("run.checkpoint_every=0", max_restarts=0))


@pytest.mark.parametrize("options", [{}, {"min_nodes": 1}, {"partition": "p", "account": "a"}])
def test_bash_reads_it(options):
    text = script("data.system_prompt=$(touch x) `y` 'z' \"w\"", config_path="/a b/$c's.yaml", **options)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)


# What is refused


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nodes": 0}, "--nodes: 0: must be at least 1; use 1 or more"),
        ({"gpus_per_node": -1}, "--gpus-per-node: -1: must be at least 0; use 0 or more"),
        ({"max_restarts": -2}, "--max-restarts: -2: must be at least 0; use 0 or more"),
        ({"min_nodes": 9}, "--min-nodes: 9: must be from 1 to --nodes: 8; use 8"),
        ({"min_nodes": 0}, "--min-nodes: 0: must be from 1 to --nodes: 8; use 1"),
        ({"port": 0}, "--port: 0: must be from 1 to 65535; use 1, or 29500, which is usual"),
        ({"port": 70000}, "--port: 70000: must be from 1 to 65535; use 65535, or 29500, which is usual"),
        ({"job_name": "my run"}, "--job-name: 'my run': must be of letters, digits and _ . , - only; use my-run"),
        ({"account": "a\n#SBATCH --nodes=99"}, "--account: 'a\\n#SBATCH --nodes=99': must be of letters"),
        (
            {"rollout_nodes": 2},
            "--rollout-nodes: 2: nodes that only serve rollouts need a rollout engine that runs as a server, and this "
            "version has only rollout.engine: local, which samples on the training nodes; use 0",
        ),
    ],
)
def test_options_that_never_work(options, expected):
    assert message(**options).startswith(expected)


@pytest.mark.parametrize("time", ["24h", "", "1:2:3", "1-", "-1", "12:00:00:00", "1-00:00:00:00", "1:00\n"])
def test_a_time_that_slurm_cannot_read(time):
    assert message(time=time).startswith(f"--time: {time!r}: must be hours:minutes:seconds or days-hours, such as 24:")


@pytest.mark.parametrize("time", ["90", "90:00", "24:00:00", "2-12", "2-12:30", "2-12:30:00"])
def test_a_time_that_slurm_reads(time):
    assert f"--time={time}" in directives(script(time=time))


def test_options_that_contradict_the_configuration():
    assert message("hardware.device=cpu", gpus_per_node=8) == (
        "--gpus-per-node: 8 has no effect with hardware.device: cpu; use 0, or hardware.device=cuda"
    )
    assert message("hardware.device=cuda", gpus_per_node=0) == (
        "--gpus-per-node: 0 with hardware.device: cuda, which needs GPUs; use at least 1, or hardware.device=cpu"
    )
    assert message("hardware.device=cuda:1") == (
        "hardware.device: 'cuda:1' names one GPU, and every rank of a node has its own; use hardware.device=cuda"
    )


def test_restarts_need_checkpoints():
    assert message("run.checkpoint_every=0") == (
        "run.checkpoint_every: 0 with --max-restarts: 3: a restart goes on from the last checkpoint, and there would "
        "be none; use run.checkpoint_every=50, or --max-restarts 0"
    )


def test_fewer_nodes_need_restarts():
    assert message(min_nodes=6, max_restarts=0) == (
        "--min-nodes: 6 has no effect with --max-restarts: 0, since going on with fewer nodes is a restart; use "
        "--max-restarts 3, or --min-nodes 8"
    )


# What it starts

FAKE_SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] || exit 1
printf 'localhost\\nnode2\\n'
"""

# One process per node, at the same time; HIDDEN_FROM_OTHERS is a path that only the first node can see.
FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for (( node = 0; node < SLURM_JOB_NUM_NODES; node++ )); do
    command=("$@")
    if (( node > 0 )) && [ -n "${HIDDEN_FROM_OTHERS:-}" ]; then
        command=("${command[@]//"$HIDDEN_FROM_OTHERS"//nowhere}")
    fi
    SLURM_NODEID=$node SLURM_PROCID=$node PET_LOCAL_ADDR=localhost "${command[@]}" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""

# Stands in for cohort.train: the ranks meet; once, the last one then fails, which the others notice.
PROBE = """
import datetime, json, os, pathlib, sys
import torch
import torch.distributed as dist

found, failed_before = (pathlib.Path(os.environ["PROBE_DIR"], name) for name in ("found", "failed-before"))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
if dist.get_rank() == 3 and not failed_before.exists():
    failed_before.touch()
    sys.exit("on purpose")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
environment = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "SLURM_NODEID", "OMP_NUM_THREADS")}
record = {**environment, "sum": ranks.item(), "arguments": sys.argv[1:], "cwd": os.getcwd()}
(found / os.environ["RANK"]).write_text(json.dumps(record))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two nodes that are this machine; in `tmp_path`, which is the working directory."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "found").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
        "PROBE_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "6",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run_script(text: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script and, if it takes too long, end all that it started."""
    process = subprocess.Popen(
        ["bash", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun hands it on to its ranks
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"not done after {timeout_s} s; it said:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_it_starts_the_ranks_on_all_nodes_and_restarts_them(cluster):
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
    text = script(
        "run.dir=runs/a b",
        "hardware.device=cpu",
        "hardware.processes=2",
        "hardware.timeout_s=60",
        config_path="run.yaml",
        nodes=2,
        port=port,
    )
    assert text.count("-m cohort.train") == 1
    result = run_script(text.replace("-m cohort.train", "-m probe"), timeout_s=120)
    assert result.returncode == 0, result.stdout
    found = {p.name: json.loads(p.read_text()) for p in (cluster / "found").iterdir()}
    assert sorted(found) == ["0", "1", "2", "3"]
    assert {(f["WORLD_SIZE"], f["sum"]) for f in found.values()} == {("4", 0 + 1 + 2 + 3)}
    assert sorted((f["SLURM_NODEID"], f["LOCAL_RANK"]) for f in found.values()) == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    overrides = ["run.dir=runs/a b", "hardware.device=cpu", "hardware.processes=2", "hardware.timeout_s=60"]
    assert all(f["arguments"] == [str(cluster / "run.yaml"), *overrides] for f in found.values())
    assert {f["cwd"] for f in found.values()} == {str(cluster)}
    assert {f["OMP_NUM_THREADS"] for f in found.values()} == {"3"}
    assert (cluster / "failed-before").exists()
    assert list((cluster / "runs/a b").iterdir()) == []  # a new run wants an empty folder


def test_it_refuses_a_run_folder_that_nodes_do_not_share(cluster, monkeypatch):
    monkeypatch.setenv("HIDDEN_FROM_OTHERS", str(cluster / "runs"))
    text = script("run.dir=runs/a", "hardware.device=cpu", nodes=2)
    result = run_script(text.replace("-m cohort.train", "-m probe"), timeout_s=60)
    assert result.returncode == 2
    assert "run.dir /nowhere/a is not writable here, or is not the folder that the first node sees" in result.stdout
    assert list((cluster / "runs/a").iterdir()) == []
    assert list((cluster / "found").iterdir()) == []
