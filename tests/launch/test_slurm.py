"""The batch script for Slurm: what it says, what is refused, and that it starts the ranks, with fakes of Slurm."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cohort.config import Config, config_from_dict
from cohort.errors import UserError
from cohort.launch import torchrun
from cohort.launch.slurm import SlurmOptions, slurm_script
from cohort.run.folder import config_changes
from fake_slurm import make_cluster, run_script
from selection import slow
from waiting import free_port


def config_with(*overrides: str) -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}], "run": {"dir": "/runs/a"}}
    return config_from_dict(raw | {"rollout": {"engine": "local"}}, overrides)


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


VLLM = "rollout.engine=vllm"

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
        "--signal=USR1@120",
    ]
    named = directives(script(partition="a,b", account="team.x", job_name="run_1", time="1-12"))
    assert {"--partition=a,b", "--account=team.x", "--job-name=run_1", "--time=1-12"} <= set(named)
    assert not any("gpus" in line for line in directives(script("hardware.device=cpu")))
    quoted = next(line for line in directives(script(job_name="it's $(x)")) if line.startswith("--job-name="))
    assert shlex.split(quoted) == ["--job-name=it's $(x)"]


def test_the_header_counts_nodes_and_ranks():
    assert "# Training nodes: 8, with 4 GPUs and 4 ranks each: 32 ranks." in script(gpus_per_node=4)
    for more in ((), ("rollout.engine=auto",)):
        assert "# Rollout nodes: 0. The training nodes sample the completions themselves" in script(*more)


def test_time_to_save():
    text = script("hardware.grace_s=90.5")
    assert "--signal=USR1@151" in directives(text)
    assert "\nexport TORCH_ELASTIC_SHUTDOWN_TIMEOUT=96\n" in text
    without = directives(script("run.checkpoint_every=0", max_restarts=0))
    assert "--no-requeue" in without and not any("signal" in line for line in without)


def test_the_launcher():
    assert """
launcher=(
    python3 -m cohort.launch.torchrun
    --nnodes 8:8
    --nproc-per-node 8
    --rdzv-backend c10d
    --rdzv-endpoint "$first_node:29511"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-conf join_timeout=91,read_timeout=91  # hardware.timeout_s
    --max-restarts 2
    --monitor-interval 1
    --signals_to_handle SIGINT,SIGTERM,SIGHUP,SIGUSR1
)
training=(-m cohort train "$config" hardware.timeout_s=90.5 'model.path=a b')
""" in script("hardware.timeout_s=90.5", "model.path=a b", port=29511, max_restarts=2)


def test_who_samples():
    vllm = "rollout.engine=vllm"
    with_nodes = script(vllm, "rollout.tensor_parallel=4", rollout_nodes=3, gpus_per_node=8)
    assert "# Rollout nodes: 3, with 8 GPUs and 2 vLLM servers each: 6 servers." in with_nodes
    assert "--nodes=11" in directives(with_nodes)
    assert "    --nnodes 8:8\n" in with_nodes
    assert "# Rollout nodes: 0. The servers of rollout.urls sample" in script(vllm, "rollout.urls=[http://a:1]")
    assert "# Rollout nodes: 0. vLLM servers on the first node sample" in script(vllm, "hardware.device=cpu")


def test_ranks_are_not_told_how_to_start_servers():
    """Those keys have no effect with rollout.urls, and a key without effect is refused."""
    of_servers = (
        "rollout.tensor_parallel=2",
        "rollout.vllm_python=/v",
        "rollout.vllm_args={a: 1}",
        "rollout.servers=4",
    )
    text = script("rollout.engine=vllm", *of_servers, "rollout.gpu_memory_utilization=0.8", rollout_nodes=1)
    line = next(line for line in text.splitlines() if line.startswith("training="))
    words = shlex.split(line.removeprefix("training=(").removesuffix(")"))[4:]
    assert words[-1] == "rollout.urls=[$urls]"
    config = config_with(*words[:-1], "rollout.urls=[http://node-1:8000,http://node-1.a.b:8001]")
    assert config.rollout.urls == ("http://node-1:8000", "http://node-1.a.b:8001")
    assert config.rollout.secret_file == "/runs/a/.secret"


def test_a_path_with_any_characters_reaches_servers_and_ranks():
    text = script(VLLM, "run.dir=\"/runs/it's: 'a' #1 \\u00e4\"", rollout_nodes=1)
    of_ranks = next(line for line in text.splitlines() if line.startswith("training="))
    of_servers = next(line for line in text.splitlines() if line.startswith("' serve-rollouts "))
    for line in (of_ranks.removesuffix(")"), of_servers.removeprefix("'")):
        (override,) = (word for word in shlex.split(line) if word.startswith("rollout.secret_file="))
        assert config_with(VLLM, override).rollout.secret_file == "/runs/it's: 'a' #1 ä/.secret"


def test_fewer_nodes_may_go_on_or_all_are_needed():
    text = script(min_nodes=6)
    assert "    --nnodes 6:8\n" in text
    assert ",last_call_timeout=60 " in text
    assert "--no-kill" in directives(text)
    command = '"${launcher[@]}" "${training[@]}" || status=$?\n'
    assert f'\n"${{step[@]}}" --no-kill --kill-on-bad-exit=0 --wait=0 {command}' in text
    assert f'\n"${{step[@]}}" --kill-on-bad-exit=1 {command}' in script()


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
    ("overrides", "options", "ranks"),
    [
        ((), {}, 8),
        (("hardware.processes=auto",), {"gpus_per_node": 4}, 4),
        (("hardware.processes=4",), {"gpus_per_node": 4}, 4),
        (("hardware.processes=2",), {"gpus_per_node": 4}, 2),
        (("hardware.processes=1",), {"gpus_per_node": 4}, 1),
        (("hardware.device=cpu",), {}, 1),
        (("hardware.device=cpu", "hardware.processes=3"), {}, 3),
        (("hardware.device=cpu", "hardware.processes=auto"), {"gpus_per_node": 0}, 1),
        (("hardware.processes=2",), {"gpus_per_node": 0}, 2),
    ],
)
def test_ranks_per_node(overrides, options, ranks):
    text = script(*overrides, **options)
    assert f"    --nproc-per-node {ranks}\n" in text and f"{ranks} ranks each: {8 * ranks} ranks." in text
    training = next(line for line in text.splitlines() if line.startswith("training="))
    assert training == f"training=({' '.join(['-m cohort train', chr(34) + '$config' + chr(34), *overrides])})"


def test_gpus_that_no_rank_trains_on_are_there_for_servers():
    """On every node: their numbers are per node."""
    for overrides, ranks, servers, first in (
        (("hardware.processes=7",), 7, 1, 7),
        (("hardware.rollout_gpus=4", "rollout.tensor_parallel=2"), 4, 2, 4),
        (("hardware.processes=2", "hardware.rollout_gpus=3"), 2, 3, 2),
    ):
        text = script(VLLM, *overrides)
        assert f"8 GPUs and {ranks} ranks each: {8 * ranks} ranks." in text and f"--nproc-per-node {ranks}\n" in text
        assert f" {servers} vLLM servers on the last GPUs of each training node: {8 * servers} servers." in text
        assert f"first_gpu=$(( {first} + i *" in text and "--nodes=8" in directives(text)
        assert "\nstep=(srun --cpu-bind=none --overlap)\n" in text
        training = next(line for line in text.splitlines() if line.startswith("training="))
        words = shlex.split(training.removeprefix("training=(").removesuffix(")"))[4:]
        config_with(*words[:-1], "rollout.urls=[http://node-1:8000]")  # no key without effect


def test_options_of_sbatch_come_last():
    assert directives(script(sbatch=["--qos", "high", "--constraint=a|b"]))[-1] == "--qos high '--constraint=a|b'"


def test_words_after_two_dashes_are_options_of_sbatch(tmp_path, cohort):
    (tmp_path / "run.yaml").write_text("{model: {path: m}, data: {path: d.jsonl}, rewards: [{use: math}]}")
    command = ("launch", "slurm", tmp_path / "run.yaml", "train.steps=7", "--container", "a.sif", "--mount", "/data")
    ended = cohort(*command, "--", "--qos", "high", "--gres=gpu:a100:8")
    assert ended.code == 0 and directives(ended.out)[-1] == "--qos high --gres=gpu:a100:8"
    assert 'train "$config" train.steps=7 hardware.max_restarts=3' in ended.out and ",/data:/data " in ended.out
    assert "No such option: --qos" in cohort(*command, "--qos", "high").err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sbatch": ["--qos=high", "train.steps=3"]}, "options of sbatch: 'train.steps=3' is an override of the"),
        ({"sbatch": ["--comment=a\nscancel -u me"]}, "options of sbatch: '--comment=a\\nscancel -u me' contains"),
        ({"job_name": "a\nrm -rf x"}, "--job-name: 'a\\nrm -rf x' contains a newline"),
        ({"setup": Path("a\nb.sh")}, "--setup: 'a\\nb.sh' contains a newline"),
        ({"mounts": ["relative"]}, "--mount: 'relative' is invalid; use /HERE or /HERE:/THERE, absolute"),
        ({"mounts": ["/a:b"]}, "--mount: '/a:b' is invalid"),
        ({"mounts": ["/a,b"]}, "--mount: '/a,b' is invalid"),
        ({"mounts": ["/a\nb"]}, "--mount: '/a\\nb' is invalid"),
    ],
)
def test_words_that_would_break_the_script_are_refused(options, expected):
    assert message(**options).startswith(expected)


def test_a_value_of_an_sbatch_option_is_no_override():
    assert directives(script(sbatch=["--export", "a.b=c", "--qos=high"]))[-1] == "--export a.b=c --qos=high"


def test_the_command_to_submit_is_quoted(tmp_path, cohort):
    (tmp_path / "run.yaml").write_text("{model: {path: m}, data: {path: d.jsonl}, rewards: [{use: math}]}")
    ended = cohort("launch", "slurm", tmp_path / "run.yaml", "--out", tmp_path / "j b.sh")
    assert f"sbatch '{tmp_path}/j b.sh'" in ended.out


DOCUMENTED = re.findall(
    r"^\| .* \| `(.*)` \|$", (Path(__file__).parents[2] / "docs" / "launching.md").read_text(), re.M
)


def test_documented_layouts(tmp_path, cohort):
    (tmp_path / "run.yaml").write_text("{model: {path: m}, data: {path: d.jsonl}, rewards: [{use: math}]}")
    layouts = []
    for words in DOCUMENTED:
        ended = cohort("launch", "slurm", tmp_path / "run.yaml", *shlex.split(words))
        assert ended.code == 0, ended
        layouts.append(
            [line for line in ended.out.splitlines() if re.match("# (Nodes|Training nodes|Rollout nodes)", line)]
        )
    split = "which `cohort train` splits between training and servers."
    trains = "# Training nodes: 4, with 8 GPUs and"
    assert layouts == [
        [f"# Nodes: 1, with 4 GPUs, {split}"],
        [f"# Nodes: 1, with 8 GPUs, {split}"],
        [f"# Nodes: 1, with 8 GPUs, {split}"],
        [f"{trains} 8 ranks each: 32 ranks.", "# Rollout nodes: 2, with 8 GPUs and 8 vLLM servers each: 16 servers."],
        [
            f"{trains} 6 ranks each: 24 ranks.",
            "# Rollout nodes: 0. 2 vLLM servers on the last GPUs of each training node: 8 servers.",
        ],
        [
            f"{trains} 8 ranks each: 32 ranks.",
            "# Rollout nodes: 0. The training nodes sample the completions themselves (rollout.engine: local).",
        ],
        [
            f"{trains} 8 ranks each: 32 ranks.",
            "# Rollout nodes: 0. The servers of rollout.urls sample the completions.",
        ],
    ]


def test_a_setup_file_comes_first(tmp_path):
    (tmp_path / "modules.sh").write_text("module load cuda\nconda activate $unset\n")
    lines = script(setup=tmp_path / "modules.sh").splitlines()
    assert lines[lines.index("set -euo pipefail") + 2 :][2:5] == ["module load cuda", "conda activate $unset", "set -u"]
    assert message(setup=tmp_path / "none") == f"--setup: '{tmp_path}/none' cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (
            "nvcr.io#a:1",
            "step=(srun --cpu-bind=none --container-image='nvcr.io#a:1' --container-mounts={mounts} "
            '--container-workdir="$PWD")',
        ),
        ("/images/a b.sif", "inside=(apptainer exec --nv --bind {mounts} --pwd \"$PWD\" '/images/a b.sif')"),
        ("docker://a:1", 'inside=(apptainer exec --nv --bind {mounts} --pwd "$PWD" docker://a:1)'),
    ],
)
def test_containers(image, expected):
    """Each step but the one that looks at run.dir runs in it, by the Python of the image."""
    here = Path.cwd()
    mounts = f"{here}:{here},/configs:/configs,/runs/a:/runs/a,/data:/d,/hub:/hub"
    text = script(VLLM, rollout_nodes=1, container=image, mounts=["/data:/d", "/hub"])
    assert expected.format(mounts=mounts) in text.splitlines()
    assert text.count('"${inside[@]}" ') == (0 if "#" in image else 2)
    assert text.count('"${step[@]}" ') == 2 and "export PATH" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("options", [{}, {"min_nodes": 1}, {"partition": "p", "account": "a"}, {"rollout_nodes": 2}])
def test_bash_reads_it(options):
    overrides = (
        "data.system_prompt=$(touch x) `y` 'z' \"w\"",
        *(("rollout.engine=vllm",) if "rollout_nodes" in options else ()),
    )
    text = script(*overrides, config_path="/a b/$c's.yaml", **options)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# What is refused


@pytest.mark.parametrize(
    ("overrides", "options", "expected"),
    [
        (
            ("hardware.processes=9",),
            {},
            "hardware.processes: 9 exceeds the machine's 8 GPUs (one per process); use at most 8, or auto",
        ),
        ((), {"min_nodes": 9}, "--min-nodes: 9 exceeds --nodes: 8; use 8"),
        (
            (),
            {"rollout_nodes": 2},
            "--rollout-nodes: 2 with rollout.engine: local, which samples on the training nodes; use 0, or "
            "rollout.engine=vllm",
        ),
        (
            ("hardware.device=cpu",),
            {"gpus_per_node": 8},
            "--gpus-per-node: 8 has no effect with hardware.device: cpu; use 0, or hardware.device=cuda",
        ),
        (
            ("hardware.device=cuda",),
            {"gpus_per_node": 0},
            "--gpus-per-node: 0 with hardware.device: cuda, which needs GPUs; use at least 1, or hardware.device=cpu",
        ),
        (
            ("hardware.device=cuda:1",),
            {},
            "hardware.device: 'cuda:1' names one GPU, but each rank needs its own; use hardware.device=cuda",
        ),
        (
            ("run.checkpoint_every=0",),
            {},
            "run.checkpoint_every: 0 leaves no checkpoint to restart from with --max-restarts: 3; use "
            "run.checkpoint_every=50, or --max-restarts 0",
        ),
        (
            (),
            {"min_nodes": 6, "max_restarts": 0},
            "--min-nodes: 6 has no effect with --max-restarts: 0, since continuing with fewer nodes takes a restart; "
            "use --max-restarts 3, or --min-nodes 8",
        ),
        (
            (VLLM,),
            {},
            "--rollout-nodes: 0 leaves no GPUs for the servers of rollout.engine: vllm, since the ranks use all GPUs "
            "of the training nodes; use --rollout-nodes 1, hardware.rollout_gpus=1 (of every node), rollout.urls, or "
            "--nodes 1, which splits the node's GPUs",
        ),
        (
            (VLLM, "hardware.rollout_gpus=shared"),
            {},
            "hardware.rollout_gpus: shared with --nodes: 8: servers can only share the GPUs of one node; use --nodes "
            "1, hardware.rollout_gpus=1 (of every node), or hardware.rollout_gpus=auto with whole rollout nodes ("
            "`cohort launch slurm --rollout-nodes 1`)",
        ),
        (
            (VLLM, "hardware.rollout_gpus=1"),
            {"min_nodes": 6},
            "--min-nodes: 6 with servers on the training nodes, which end with their node; use --min-nodes 8, or "
            "--rollout-nodes 1",
        ),
        (
            (VLLM, "rollout.urls=[http://a:1]"),
            {"rollout_nodes": 1},
            "rollout.urls: ['http://a:1'] conflicts with --rollout-nodes: 1, whose servers the run uses; remove one",
        ),
        (
            (VLLM, "rollout.secret_file=/s"),
            {"rollout_nodes": 1},
            "rollout.secret_file: /s conflicts with --rollout-nodes: 1, whose servers the run uses; remove one",
        ),
        (
            (VLLM, "hardware.rollout_gpus=2"),
            {"rollout_nodes": 1},
            "hardware.rollout_gpus: 2 conflicts with --rollout-nodes: 1, whose servers the run uses; remove one",
        ),
        (
            (VLLM, "rollout.tensor_parallel=3"),
            {"rollout_nodes": 1},
            "rollout.tensor_parallel: 3 does not divide the 8 GPUs of a rollout node, and a server cannot span "
            "nodes; use 2 or 4",
        ),
        (
            (VLLM, "rollout.tensor_parallel=16"),
            {"rollout_nodes": 2},
            "rollout.tensor_parallel: 16 does not divide the 8 GPUs of a rollout node, and a server cannot span nodes; "
            "use 8",
        ),
        (
            (VLLM, "rollout.servers=3", "rollout.tensor_parallel=4"),
            {"rollout_nodes": 2},
            "rollout.servers: 3 does not match the 4 servers of --rollout-nodes: 2; use auto",
        ),
        (
            (VLLM, "rollout.tensor_parallel=2", "hardware.device=cpu"),
            {"rollout_nodes": 1},
            "rollout.tensor_parallel: 2 requires GPUs, but there are none; use 1",
        ),
    ],
)
def test_what_is_refused(overrides, options, expected):
    assert message(*overrides, **options).startswith(expected)


def test_a_run_goes_on_with_servers_elsewhere():
    """A job that is started again may get other nodes."""
    before, after = (config_with(VLLM, f"rollout.urls={urls}") for urls in ("[http://a:1, http://b:1]", "[http://c:1]"))
    assert config_changes(before, after) == {}
    assert config_changes(before, config_with(VLLM)) == {}
    assert config_changes(before, config_with(VLLM, "rollout.urls=[http://a:1]", "rollout.top_k=5")) == {
        "rollout.top_k": (0, 5)
    }


# What it starts

# Stands in for `cohort train`: the ranks meet; once, the last one then fails, which the others notice.
PROBE = """
import datetime, json, os, pathlib, sys
import torch
import torch.distributed as dist

found, failed_before = (pathlib.Path(os.environ["PROBE_DIR"], name) for name in ("found", "failed-before"))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
if dist.get_rank() == 3 and not failed_before.exists():
    failed_before.touch()
    sys.exit("on purpose")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
environment = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "SLURM_NODEID", "OMP_NUM_THREADS")}
record = {**environment, "sum": ranks.item(), "arguments": sys.argv[1:], "cwd": os.getcwd()}
(found / os.environ["RANK"]).write_text(json.dumps(record))
dist.barrier()  # gloo may abort a process that exits with connections open
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (tmp_path / "probe.py").write_text(PROBE)
    return make_cluster(tmp_path, monkeypatch)


@slow("two launchers with four ranks, twice; bash reads the script")
def test_it_starts_the_ranks_on_all_nodes_and_restarts_them(cluster):
    text = script(
        "run.dir=runs/a b",
        "hardware.device=cpu",
        "hardware.processes=2",
        "hardware.timeout_s=600",
        config_path="run.yaml",
        nodes=2,
        port=free_port(),
    )
    assert text.count("-m cohort train") == 1
    result = run_script(text.replace("-m cohort train", "-m probe"))
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
    overrides = ["run.dir=runs/a b", "hardware.device=cpu", "hardware.processes=2", "hardware.timeout_s=600"]
    assert all(f["arguments"] == [str(cluster / "run.yaml"), *overrides] for f in found.values())
    assert {f["cwd"] for f in found.values()} == {str(cluster)}
    assert {f["OMP_NUM_THREADS"] for f in found.values()} == {"3"}
    assert (cluster / "failed-before").exists()
    assert list((cluster / "runs/a b").iterdir()) == []  # a new run wants an empty folder


def test_it_refuses_a_run_folder_that_nodes_do_not_share(cluster, monkeypatch):
    monkeypatch.setenv("HIDDEN_FROM_OTHERS", str(cluster / "runs"))
    text = script("run.dir=runs/a", "hardware.device=cpu", nodes=2)
    result = run_script(text.replace("-m cohort train", "-m probe"))
    assert result.returncode == 2
    assert "run.dir /nowhere/a is not writable here, or is not the folder that the first node sees" in result.stdout
    assert list((cluster / "runs/a").iterdir()) == []
    assert list((cluster / "found").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "job", "requeued"),
    [
        (143, "PreemptTime=2026-01-01T00:00:00", True),
        (138, "EndTime=$(date -d '+100 seconds' +%FT%T) PreemptTime=None", True),
        (143, "EndTime=$(date -d '+1 hour' +%FT%T) PreemptTime=None", False),  # `scancel --signal`
        (143, "EndTime=Unknown PreemptTime=None", False),
        (1, "PreemptTime=2026-01-01T00:00:00", False),
    ],
)
def test_a_job_that_slurm_stops_is_requeued(cluster, monkeypatch, code, job, requeued):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("JOB", subprocess.check_output(["bash", "-c", f'echo -n "{job}"'], text=True))
    text = script(VLLM, "run.dir=runs/a", "hardware.rollout_gpus=1", nodes=1, gpus_per_node=4)
    result = run_script(text.replace("python3 -m cohort train", f"bash -c 'exit {code}'"))
    assert result.returncode == code
    assert (cluster / "requeued").exists() == requeued == ("requeued; the job resumes" in result.stdout)


def test_training_saves_after_a_signal_has_ended_the_servers(cluster):
    text = script(VLLM, "run.dir=runs/a", "hardware.rollout_gpus=1", nodes=2)
    text = text.replace("python3 -m cohort serve", "exit 143; :")
    text = text.replace("python3 -m cohort.launch.torchrun", "bash -c 'sleep 1; touch saved; exit 138'")
    result = run_script(text)
    assert (cluster / "saved").exists() and result.returncode == 138, result.stdout


def test_torchrun_ends_as_the_ranks_did(monkeypatch):
    """Without a traceback."""

    def code_after(error: Exception) -> object:
        def run() -> None:
            raise error

        monkeypatch.setattr(torchrun, "torchrun", run)
        with pytest.raises(SystemExit) as ended:
            torchrun.main()
        return ended.value.code

    def failed(*codes: int) -> ChildFailedError:
        failures = {r: ProcessFailure(local_rank=r, pid=r, exitcode=c, error_file="") for r, c in enumerate(codes)}
        return ChildFailedError("cohort", failures)

    assert code_after(SignalException("stopped", signal.SIGTERM)) == 143
    assert code_after(failed(138, 138)) == 138
    assert code_after(failed(143, 1)) == 1 and code_after(failed(2, -15)) == 2
