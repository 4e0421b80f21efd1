"""`cohort doctor` names planted faults and their fixes, also below the error of a run that does not start."""

import json
import os
import resource
import shutil
import socket
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cohort.cli import command
from cohort.config import Config, config_from_dict
from cohort.doctor import examine, failed_checks
from cohort.doctor.checks import CHECKS
from cohort.errors import UserError
from cohort.launch.python_trainer import Trainer
from commands import set_up
from configs import MINIMAL
from permissions import without_override

LINKS = "\t\033[4mGPU0\tGPU1\tCPU Affinity\033[0m\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n"


class Planted:
    """A machine with faults: files are real, the GPUs and some numbers are made up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.config: Config | None = self.configured()

    def configured(self, **sections: Any) -> Config:
        return config_from_dict({**MINIMAL, "run": {"dir": str(self.folder / "run")}, **sections})

    def nvidia_smi(
        self, *, cuda: str = "13.0", used: int = 4, num: int = 2, links: str = LINKS, runs: str = ""
    ) -> None:
        """Two GPUs with a driver; `runs` takes the place of its answers."""
        rows = "".join(f"NVIDIA H100, 580.65.06, 81559, {used}\n" for _ in range(num))
        answers = f"""case "$1" in
--query-gpu*) printf '%b' '{rows!s}' ;;
topo) printf '%b' '{links}' ;;
*) echo '| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: {cuda}    |' ;;
esac
"""
        self.program("nvidia-smi", runs or answers)
        self.patch.setattr(torch.version, "cuda", "13.0")
        self.patch.setattr(torch.cuda, "device_count", lambda: num)
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def program(self, name: str, script: str) -> None:
        (self.folder / "bin").mkdir(exist_ok=True)
        (self.folder / "bin" / name).write_text(f"#!/bin/sh\n{script}")
        (self.folder / "bin" / name).chmod(0o755)
        self.patch.setenv("PATH", f"{self.folder / 'bin'}:/usr/bin:/bin")

    def environment(self, **packages: str) -> Path:
        """Make an environment with packages of these versions, and return its Python."""
        venv.create(self.folder / "env", symlinks=True)
        self.packages(next((self.folder / "env" / "lib").glob("python*/site-packages")), **packages)
        return self.folder / "env" / "bin" / "python"

    def packages(self, site: Path, **packages: str) -> None:
        for name, version in packages.items():
            (site / f"{name}-{version}.dist-info").mkdir(parents=True)
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)

    def installed(self, **packages: str) -> None:
        """Packages that come before those of this environment."""
        self.packages(self.folder / "site", **packages)
        self.patch.syspath_prepend(self.folder / "site")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.delenv("COHORT_VLLM_PYTHON", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Planted(tmp_path, monkeypatch)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def old_package(planted: Planted) -> None:
    planted.installed(peft="0.10.1")


def old_driver(planted: Planted) -> None:
    planted.nvidia_smi(cuda="12.2")
    planted.patch.setattr(torch.cuda, "is_available", lambda: False)


def no_fabric_manager(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setattr(torch.cuda, "is_available", lambda: False)


def torch_for_cpus(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setattr(torch.version, "cuda", None)


def hidden_gpus(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setattr(torch.cuda, "device_count", lambda: 0)
    planted.patch.setenv("CUDA_VISIBLE_DEVICES", "7")


def broken_driver(planted: Planted) -> None:
    planted.nvidia_smi(runs="echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")


def no_gpus(planted: Planted) -> None:
    planted.patch.setenv("PATH", str(planted.folder))
    planted.config = planted.configured(hardware={"device": "cuda"})


def busy_gpus(planted: Planted) -> None:
    planted.nvidia_smi(used=70_000)


def partial_nvlink(planted: Planted) -> None:
    planted.nvidia_smi(num=3, links=LINKS.replace("\t0-31\n", "\tSYS\t0-31\n") + "GPU2\tSYS\tSYS\t X \t0-31\n")


def unpinned_memory(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    planted.patch.setattr("cohort.models.host_memory._clear_error", lambda device: None)


def no_triton(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setitem(sys.modules, "triton", None)


def no_vllm(planted: Planted) -> None:
    planted.config = planted.configured(rollout={"engine": "vllm", "vllm_python": str(planted.environment())})


def old_vllm(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.patch.setenv("COHORT_VLLM_PYTHON", str(planted.environment(vllm="0.11.0")))


def other_nccl(planted: Planted) -> None:
    planted.nvidia_smi()
    planted.installed(nvidia_nccl_cu13="2.28.9")
    python = planted.environment(vllm="0.32.0", nvidia_nccl_cu13="2.27.5")
    planted.patch.setenv("COHORT_VLLM_PYTHON", str(python))


def small_shared_memory(planted: Planted) -> None:
    planted.nvidia_smi()
    status, real = SimpleNamespace(f_bavail=16_000, f_blocks=16_384, f_bfree=16_000, f_frsize=4096), os.statvfs
    planted.patch.setattr(os, "statvfs", lambda path: status if path == "/dev/shm" else real(path))


def few_files(planted: Planted) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (800, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def local_folder(planted: Planted) -> None:
    planted.patch.setattr(psutil, "disk_partitions", lambda all: mounts("ext4"))
    planted.patch.setenv("SLURM_JOB_NUM_NODES", "2")


def mounts(kind: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(mountpoint="/", fstype=kind), SimpleNamespace(mountpoint="/elsewhere", fstype="nfs4")]


def full_disk(planted: Planted) -> None:
    planted.patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300 << 20))


def taken_port(planted: Planted) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    planted.patch.setattr("cohort.doctor.checks.PORTS", {server.getsockname()[1]: "`cohort serve`"})
    planted.patch.setattr(planted, "server", server, raising=False)  # open until the end of the test


def no_sandbox(planted: Planted) -> None:
    planted.patch.setenv("PATH", str(planted.folder))
    planted.patch.setitem(sys.modules, "sandlock", None)
    planted.config = planted.configured(rewards=[{"use": "code"}])


@pytest.mark.parametrize(
    ("plant", "name", "status", "found", "fix"),
    [
        (old_package, "Python", "fail", "too old: peft", "pip install 'peft>=0.19'"),
        (old_driver, "torch", "fail", "for CUDA 13.0, driver 580.65.06 for CUDA 12.2", "Update the driver"),
        (no_fabric_manager, "torch", "fail", "cannot initialize CUDA", "nvidia-fabricmanager"),
        (torch_for_cpus, "torch", "fail", "for CPUs, but there are GPUs", "Install a CUDA build"),
        (hidden_gpus, "torch", "fail", "sees 0 of 2 GPUs, CUDA_VISIBLE_DEVICES is '7'", "Correct CUDA_VISIBLE_DEVICES"),
        (broken_driver, "GPUs", "fail", "Driver/library version mismatch", "Reboot"),
        (no_gpus, "GPUs", "fail", "none, but hardware.device is cuda", "Install the driver"),
        (busy_gpus, "GPUs", "warn", "2 x NVIDIA H100, 85.5 GB; memory is in use on GPU 0, GPU 1", "nvidia-smi"),
        (partial_nvlink, "GPU links", "warn", "some GPUs only (NV18, SYS)", "nvidia-smi topo -m"),
        (unpinned_memory, "pinned memory", "warn", "could not be pinned (cudaHostRegister error 2)", "ulimit -l"),
        (no_triton, "Triton", "warn", "not installed", "pip install triton"),
        (no_vllm, "vLLM", "fail", "has no vLLM", "set COHORT_VLLM_PYTHON"),
        (old_vllm, "vLLM", "warn", "has vLLM 0.11.0, but Cohort needs 0.32", "pip install vllm"),
        (other_nccl, "NCCL", "warn", "2.28.9, but 2.27.5 beside vLLM", "same version of torch"),
        (small_shared_memory, "/dev/shm", "fail", "66 MB free", "--shm-size"),
        (few_files, "open files", "fail", "limit of 800 (ulimit -n); a run may need 1024", "ulimit -n"),
        (local_folder, "shared by nodes", "fail", "no: ext4, on this node only", "Set run.dir"),
        (full_disk, "disk space", "fail", "315 MB free", "Free some space"),
        (taken_port, "ports", "warn", "the default of `cohort serve`", "ss -ltnp"),
        (no_sandbox, "sandbox", "fail", "no backend works here", "Install bubblewrap"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_named_with_its_fix(
    planted: Planted, plant: Callable[[Planted], None], name: str, status: str, found: str, fix: str
):
    plant(planted)
    (finding,) = examine(planted.config, [name])
    assert (finding.name, finding.status) == (name, status), finding
    assert found in finding.found and fix in finding.fix


def test_a_folder_that_may_not_be_written(planted: Planted, tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        with without_override():
            (finding,) = examine(planted.config, ["run.dir"])
    finally:
        tmp_path.chmod(0o700)
    assert (finding.status, finding.found) == ("fail", f"{tmp_path} cannot be written: Permission denied")


def test_a_good_machine_has_no_findings(planted: Planted):
    """With two GPUs, NVLink, a driver that fits, the same NCCL, and a file system of all nodes."""
    planted.nvidia_smi()
    planted.installed(nvidia_nccl_cu13="2.28.9")
    beside = {"vllm": "0.32.0", "nvidia_nccl_cu13": "2.28.9", "torch": "2.13.0", "transformers": "5.19.0"}
    planted.patch.setenv("COHORT_VLLM_PYTHON", str(planted.environment(**beside)))
    planted.patch.setattr(psutil, "disk_partitions", lambda all: mounts("nfs4"))
    planted.patch.setenv("SLURM_JOB_NUM_NODES", "2")
    names = ["GPUs", "torch", "GPU links", "vLLM", "vLLM's environment", "NCCL", "shared by nodes", "sandbox"]
    findings = {finding.name: finding for finding in examine(planted.config, names)}
    assert {finding.status for finding in findings.values()} == {"ok"}, findings
    assert findings["GPU links"].found == "NVLink (NV18)"
    assert findings["vLLM's environment"].found == "Cohort could be installed in it (torch 2.13.0, transformers 5.19.0)"


def test_an_environment_that_cannot_hold_cohort(planted: Planted):
    planted.patch.setenv("COHORT_VLLM_PYTHON", str(planted.environment(vllm="0.32.0", transformers="4.57.1")))
    (finding,) = examine(planted.config, ["vLLM's environment"])
    assert "cannot hold Cohort, which needs newer ones of transformers 4.57.1" in finding.found


def test_nccl_is_not_needed_without_a_gpu(planted: Planted):
    no_gpus(planted)
    (finding,) = examine(planted.config, ["NCCL"])
    assert (finding.status, finding.found) == ("ok", "not needed without a GPU")


def test_overrides_need_a_file(cohort: Any):
    ended = cohort("doctor", "train.steps=3")
    assert ended.code == 2 and "overrides need a configuration file before them" in ended.err


def test_a_check_that_fails_itself_hides_no_other(planted: Planted):
    planted.nvidia_smi()
    planted.program(
        "nvidia-smi", "[ $1 = topo ] && exit 3; echo 'NVIDIA H100, 580, 81559, 4'; echo 'NVIDIA H100, 580, 81559, 4'"
    )
    links, files = examine(planted.config, ["GPU links", "open files"])
    assert (links.status, links.found) == ("warn", "not checked: OSError: exit code 3")
    assert files.status == "ok"


def test_the_command_lists_every_check(planted: Planted, tmp_path: Path, cohort: Any):
    config = set_up(tmp_path, rollout={"engine": "local"})
    planted.patch.setattr("cohort.doctor.checks._PROBE_BYTES", 1 << 20)
    few_files(planted)
    ended = cohort("doctor", config)
    lines = ended.out.splitlines()
    assert (ended.code, ended.err) == (1, "")
    assert [line[6:24].strip() for line in lines if line[:4].strip() in ("ok", "warn", "fail")] == list(CHECKS)
    at = next(i for i, line in enumerate(lines) if line.startswith("fail"))
    assert lines[at] == "fail  open files          limit of 800 (ulimit -n); a run may need 1024"
    assert lines[at + 1].startswith(f"{'':26}fix: ulimit -n ")
    assert lines[-1].startswith(f"{len(CHECKS)} checks: 1 failed, ")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ended = cohort("doctor", config, "--json")
    found = json.loads(ended.out)
    assert (ended.code, found["ok"]) == (0, True)
    assert [finding["name"] for finding in found["findings"]] == list(CHECKS)


def test_a_run_that_fails_to_start_adds_what_fails(planted: Planted, tmp_path: Path, cohort: Any):
    config = set_up(tmp_path, data={"path": "missing.jsonl"})
    few_files(planted)
    ended = cohort("train", config)
    assert ended.code == 2
    error, *added = ended.err.splitlines()
    assert error.startswith("error: ") and "missing.jsonl" in error
    assert added[:2] == [
        "`cohort doctor` finds on this machine:",
        "fail  open files          limit of 800 (ulimit -n); a run may need 1024",
    ]
    assert len(added) == 3 and "fix: ulimit -n" in added[2]
    assert "cohort doctor" not in cohort("plan", config).err  # starts no run


def test_a_trainer_that_fails_to_start_adds_it_too(planted: Planted, tmp_path: Path, capsys: Any):
    few_files(planted)
    trainer = Trainer("model", str(tmp_path / "missing.jsonl"), ["math"], run={"dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        trainer.train()
    added = "fail  open files          limit of 800 (ulimit -n); a run may need 1024\n"
    assert f"`cohort doctor` finds on this machine:\n{added}" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["after a step", "named", "another rank", "the doctor fails"])
def test_nothing_is_added(planted: Planted, monkeypatch: pytest.MonkeyPatch, capsys: Any, case: str):
    few_files(planted)
    monkeypatch.setattr(command, "_run", None)
    assert planted.config is not None
    command.set_run(planted.config)
    error = UserError("too many open files" if case == "named" else "something else")
    if case == "after a step":
        (planted.folder / "run").mkdir()
        (planted.folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    elif case == "another rank":
        monkeypatch.setenv("RANK", "1")
    elif case == "the doctor fails":
        monkeypatch.setattr("cohort.doctor.failed_checks_text", lambda *_, **__: 1 / 0)
    command._print_failed_checks(error)
    assert capsys.readouterr().err == ""


def test_a_driver_that_hangs_does_not_delay_the_error(planted: Planted):
    few_files(planted)
    planted.nvidia_smi(runs="exec sleep 60")
    assert planted.config is not None
    start = time.monotonic()
    assert [finding.name for finding in failed_checks(planted.config, timeout_s=3)] == ["open files"]
    assert time.monotonic() - start < 30
