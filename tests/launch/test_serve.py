"""`cohort serve`: the command that it prints and runs, and that the server goes when it goes. The server is made up."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import Config, config_from_dict, load_config
from cohort.errors import TrainingError, UserError
from cohort.launch.serve import as_shell, serve, serve_command
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm.server import server_options
from cohort.rollout.engines.vllm.setup import VllmSetup
from cohort.rollout.engines.vllm.setup import _connect as connect
from fake_vllm import SECRET, FakeVllm, ThreadServer
from forked import fork, run_module
from waiting import until

# Says that it is vLLM of the right version; as a server it writes down how it was started, and stays. It begins as a
# script of the shell, and as a text of Python: the path of an interpreter in a #! line has no spaces.
FAKE_PYTHON = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, subprocess, sys, time
if sys.argv[1] == "-I":
    print(json.dumps({{"vllm": "{version}"}}))
    sys.exit()
child = subprocess.Popen(["sleep", "300"])  # as an engine
found = {{"argv": sys.argv[1:], "pids": [os.getpid(), child.pid], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}
found["worker"] = os.environ["PYTHONPATH"]
found["rank"] = os.environ.get("RANK")
with open("{folder}/writing", "w") as file:
    json.dump(found, file)
os.rename("{folder}/writing", "{folder}/found")
time.sleep({stays_s})
"""


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret file is made in the working directory."""
    monkeypatch.chdir(tmp_path)


def raw_config(**rollout: Any) -> dict[str, Any]:
    return {
        "model": {"path": "some/model"},
        "data": {"path": "d.jsonl"},
        "rewards": [{"use": "math"}],
        "rollout": {"engine": "vllm", "secret_file": "secret", **rollout},
    }


def config_with(*overrides: str, **rollout: Any) -> Config:
    return config_from_dict(raw_config(**rollout), overrides)


def fake_python(folder: Path, *, stays_s: float = 300, version: str = "0.32.0") -> Path:
    file = folder / "python"
    file.write_text(FAKE_PYTHON.format(python=sys.executable, folder=folder, stays_s=stays_s, version=version))
    file.chmod(0o755)
    return file


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


# The command


def test_what_the_configuration_says_reaches_the_server():
    command, environment = serve_command(
        config_with(
            "hardware.device=cpu",
            "model.trust_remote_code=true",
            "train.seed=5",
            vllm_python="/v/python",
            vllm_args={"max_num_batched_tokens": 4096},
            max_num_seqs=7,
            max_prompt_tokens=100,
            max_completion_tokens=50,
        ),
        host="0.0.0.0",
        port=8123,
    )
    assert command[:3] == ["/v/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert {name: option(command, name) for name in ("--model", "--host", "--port", "--dtype", "--seed")} == {
        "--model": "some/model",
        "--host": "0.0.0.0",
        "--port": "8123",
        "--dtype": "float32",
        "--seed": "5",
    }
    assert option(command, "--max-num-seqs") == "7" and option(command, "--max-model-len") == "150"
    assert option(command, "--max-num-batched-tokens") == "4096" and "--trust-remote-code" in command
    assert any((Path(folder) / "cohort_vllm_worker.py").is_file() for folder in environment["PYTHONPATH"].split(":"))


def test_a_server_has_its_share_of_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    command, environment = serve_command(config_with(tensor_parallel=2), host="127.0.0.1", port=8000)
    assert environment["CUDA_VISIBLE_DEVICES"] == "7,6"
    assert option(command, "--tensor-parallel-size") == "2" and option(command, "--dtype") == "bfloat16"
    assert option(command, "--gpu-memory-utilization") == "0.9" and "--enable-sleep-mode" not in command
    with pytest.raises(UserError, match=r"rollout.tensor_parallel: 8 exceeds this machine's 4 GPUs; use at mo"):
        serve_command(config_with(tensor_parallel=8), host="127.0.0.1", port=8000)


def test_a_server_on_a_shared_gpu_leaves_room():
    options = server_options(config_with(), gpus="0", shared=True)
    assert options.sleep and options.gpu_memory_utilization == 0.45
    assert server_options(config_with(gpu_memory_utilization=0.3), gpus="0", shared=True).gpu_memory_utilization == 0.3


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "expected"),
    [
        ((), True, "bfloat16"),
        ((), False, "float32"),
        (("model.dtype=bfloat16",), False, "bfloat16"),
        (("model.compute_dtype=float32",), True, "float32"),
        (("model.dtype=float64",), False, "float32"),
        (("model.dtype=float64",), True, "float32"),
        (("rollout.dtype=bfloat16",), False, "bfloat16"),
    ],
)
def test_servers_compute_as_the_trainer_does(overrides, on_gpu, expected):
    assert server_options(config_with(*overrides), gpus="0" if on_gpu else "").dtype == expected


def test_there_is_room_for_the_longest_of_training_and_evaluation():
    config = config_with("eval.path=e.jsonl", "eval.max_completion_tokens=900", max_completion_tokens=100)
    assert server_options(config, gpus="").max_model_len == 512 + 900


def test_the_printed_command_is_the_one_that_is_run(tmp_path):
    python = fake_python(tmp_path, stays_s=0)
    awkward = {"hf_overrides": {"a": "it's $HOME `x`"}, "chat_template": "{{ a }}\n b"}
    config = config_with("hardware.device=cpu", vllm_python=str(python), vllm_args=awkward)
    command, environment = serve_command(config, host="127.0.0.1", port=8000)
    subprocess.run(["bash", "-c", as_shell(command, environment)], check=True, timeout=600)
    found = json.loads((tmp_path / "found").read_text())
    psutil.Process(found["pids"][1]).kill()
    assert found["argv"] == command[1:] and found["worker"] == environment["PYTHONPATH"]


def test_only_vllm_is_served():
    local = config_from_dict(raw_config() | {"rollout": {"engine": "local"}})
    with pytest.raises(UserError, match=r"rollout.engine: local samples in the training processes, without a server"):
        serve_command(local, host="127.0.0.1", port=8000)


# The command line


def config_file(folder: Path) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(raw_config(vllm_python=str(fake_python(folder)))))
    return file


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_server_goes_with_it(tmp_path, monkeypatch, number, code):
    monkeypatch.setenv("RANK", "0")  # of a launcher around it; a server has no rank
    arguments = ("cohort", "serve", str(config_file(tmp_path)), "hardware.device=cpu")
    process = fork(run_module, *arguments, out=tmp_path / "said")
    until(lambda: (tmp_path / "found").exists() or not process.is_alive())
    found = json.loads((tmp_path / "found").read_text())
    pids = found["pids"]
    assert all(map(runs, pids)) and found["rank"] is None
    os.kill(process.pid, number)
    process.join(600)
    assert process.exitcode == code
    until(lambda: not any(map(runs, pids)))


def test_a_server_that_ends_by_itself_is_a_failure(tmp_path):
    """vLLM's exit code is 0 after its engine has died."""
    config = config_with("hardware.device=cpu", vllm_python=str(fake_python(tmp_path, stays_s=0)))
    with pytest.raises(TrainingError, match="the server exited with code 0"):
        serve(config, host="127.0.0.1", port=8000)
    pids = json.loads((tmp_path / "found").read_text())["pids"]
    until(lambda: not any(map(runs, pids)))


def test_another_vllm_is_refused(tmp_path):
    config = config_with("hardware.device=cpu", vllm_python=str(fake_python(tmp_path, version="0.9.1")))
    with pytest.raises(UserError, match=r"has vLLM 0\.9\.1"):
        serve(config, host="127.0.0.1", port=8000)
    assert not (tmp_path / "found").exists()


def test_print_only_starts_nothing(tmp_path):
    options = ["hardware.device=cpu", "--print-only", "--port", "8123"]
    done = CliRunner().invoke(app, ["serve", str(config_file(tmp_path)), *options])
    assert done.exit_code == 0 and "    --host 127.0.0.1 \\\n    --port 8123 \\\n" in done.output
    assert not (tmp_path / "found").exists()


# The run that it serves

DOCS = Path(__file__).parents[2] / "docs" / "rollouts.md"


def documented() -> tuple[str, list[list[str]], list[str]]:
    """Of the docs' section on servers elsewhere: the file, the commands beside it, and the one for a file without."""
    section = DOCS.read_text().partition("## Servers that someone else runs")[2].partition("\n## ")[0]
    _, file, _, commands, text = section.split("```")
    inline = next(part for part in text.split("`") if part.startswith("cohort train run.yaml '"))
    lines = [shlex.split(line, comments=True) for line in commands.strip().splitlines()]
    return file.removeprefix("yaml"), lines, shlex.split(inline)


def test_both_sides_read_the_documented_file_by_the_documented_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    text, commands, _ = documented()
    Path("run.yaml").write_text(yaml.safe_dump(raw_config() | yaml.safe_load(text)))
    assert [words[:3] for words in commands] == [["cohort", side, "run.yaml"] for side in ("serve", "serve", "train")]
    for words, port in zip(commands, ("8000", "8001"), strict=False):
        done = CliRunner().invoke(app, [*words[1:], "--print-only"])
        printed = shlex.split(done.output)
        assert done.exit_code == 0 and option(printed, "--tensor-parallel-size") == "2"
        assert (option(printed, "--host"), option(printed, "--port")) == ("0.0.0.0", port)
    config = load_config("run.yaml", commands[2][3:])
    assert config.rollout.urls == ("http://node7:8000", "http://node7:8001")
    with pytest.raises(UserError, match="tensor_parallel: 2 has no effect with urls"):  # what belongs to one side alone
        load_config("run.yaml", commands[0][3:4])


def test_a_file_that_describes_own_servers_trains_elsewhere_by_the_documented_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(raw_config(tensor_parallel=2)))
    config = load_config("run.yaml", documented()[2][3:])
    assert config.rollout.urls == ("http://node7:8000",)
    with pytest.raises(UserError, match="tensor_parallel: 2 has no effect with urls"):
        load_config("run.yaml", documented()[2][3:4])


def connect_to(**server: Any) -> FakeVllm:
    """Have a run connect to a server elsewhere, which says no to the weights in the end."""
    handle = ThreadServer()
    handle.start()
    (fake,) = handle.fakes
    for name, value in server.items():
        setattr(fake, name, value)
    config = config_with("hardware.timeout_s=600", urls=[handle.url])
    try:
        with pytest.raises(ServerError, match="this one takes no weights"):
            connect(
                config,
                Secret(SECRET),
                torch.device("cpu"),
                handle.url,
                sleeps=False,
                ipc_gpus=frozenset(),
                notify=print,
            )
    finally:
        handle.stop()
    return fake


def test_a_server_elsewhere_says_how_many_workers_the_weights_have_to_reach():
    """The run has no key for it."""
    assert connect_to(num_workers=2).meeting["world_size"] == 3
    assert connect_to(num_workers=1).meeting["world_size"] == 2


def test_an_older_vllm_elsewhere_is_refused_and_a_newer_one_named(capsys):
    with pytest.raises(UserError, match=r"rollout.urls: http://127.0.0.1:\d+ has vLLM 0.31.1, but .* 0.32 or newer"):
        connect_to(vllm_version="0.31.1")
    connect_to(vllm_version="0.99.1")
    assert "vLLM 0.99.1 is newer than 0.32.0, which Cohort was tested with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "expected"),
    [
        ((), 1, torch.bfloat16),
        ((), 0, torch.float32),
        (("hardware.device=cpu",), 1, torch.float32),
        (("model.compute_dtype=float32",), 1, torch.float32),
        (("rollout.dtype=bfloat16",), 0, torch.bfloat16),
    ],
)
def test_a_server_elsewhere_computes_as_the_run_does(monkeypatch, overrides, num_gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    config = config_with(*overrides, urls=["http://a:1"], secret_file=None)
    servers = VllmSetup(SimpleNamespace(config=config, adapter=None))
    assert servers.dtype == expected and servers.placement is None
