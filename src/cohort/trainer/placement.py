"""Choose the rollout engine (`rollout.engine: auto`), and place rollout servers on this machine's GPUs."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cohort.config import Config, load_config
from cohort.errors import UserError
from cohort.plan import rollout_engine
from cohort.plan.hardware import Hardware
from cohort.plan.rollout_engine import set_engine, vllm_incompatibility
from cohort.plan.shape import ModelShape, similar_shape, try_read_shape
from cohort.plan.split import GpuSplit, split_gpus
from cohort.rollout.engines.vllm.server import check_vllm, vllm_python
from cohort.run.files import has_progress, is_run_folder

PLACEMENT = "COHORT_SERVER_GPUS"  # environment variable: a Placement as JSON
_QUERY_GPU_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Servers that a run starts, with physical device ids."""

    gpus: tuple[str, ...]  # CUDA_VISIBLE_DEVICES of each server, such as "6,7"; "" on CPU
    shared: bool  # server i is on the GPU of rank i, which puts it to sleep
    keeps_base: bool = False  # see `GpuSplit`
    reason: str  # for the user

    def environment(self) -> dict[str, str]:
        """Environment variable that passes the placement to the training processes."""
        return {PLACEMENT: json.dumps(asdict(self))}


def server_placement(config: Config) -> Placement:
    """Placement of the run's servers, for rank 0, which starts them.

    `cohort train` passes it to its processes. Under another launcher, servers get the GPUs that no rank uses.

    Args:
        config: configuration of a run that uses servers, without `rollout.urls`.

    Raises:
        UserError: there are no GPUs for the servers.
    """
    if PLACEMENT in os.environ:
        placement = json.loads(os.environ[PLACEMENT])
        return Placement(**{**placement, "gpus": tuple(placement["gpus"])})
    num_here, num_all = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    if num_all > num_here:
        _check_several_machines(config, num_here)
    hardware = config.hardware.model_copy(update={"processes": num_here})
    split = split_machine(config.model_copy(update={"hardware": hardware}))
    assert split is not None
    return place(config, split, list(range(num_here)))


def split_machine(config: Config) -> GpuSplit | None:
    """Split this machine's GPUs; None for a run that starts no servers.

    Raises:
        UserError: the configuration requires GPUs that this machine does not have.
    """
    if not config.rollout.uses_servers or config.rollout.urls:
        return None
    num = num_gpus(config)
    decides = num > 1 and config.hardware.rollout_gpus == config.hardware.processes == "auto"
    decides |= num > 0 and config.rollout.engine == "vllm" and config.model.adapter is not None
    return split_gpus(
        config,
        num_gpus=num,
        shape=_shape(config.model.path) if decides else None,
        hardware=_hardware(num) if decides else None,
    )


def vllm_memory_shortfall(config: Config) -> str | None:
    """Why vLLM does not fit alongside training on this machine according to the plan; None if it fits or is unknown.

    Args:
        config: configuration with `rollout.engine: auto` that vLLM supports.

    Raises:
        UserError: the configuration requires GPUs that this machine does not have.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE")  # set by another launcher, which decides the number of processes
    if started is not None:
        config = config.model_copy(update={"hardware": config.hardware.model_copy(update={"processes": int(started)})})
    shape, hardware = _shape(config.model.path), _hardware(num_gpus(config))
    return None if shape is None or hardware is None else rollout_engine.vllm_memory_shortfall(config, shape, hardware)


def place(config: Config, split: GpuSplit, slots: list[int]) -> Placement:
    """Translate a split into physical device ids.

    Args:
        config: configuration of the run.
        split: split of this machine.
        slots: indices into `split.training_gpus` in use; a failed GPU may have been dropped.
    """
    devices = visible_devices(config)
    # no server on a dropped shared GPU: no rank would put it to sleep
    servers = [split.server_gpus[slot] for slot in slots] if split.shared else split.server_gpus
    return Placement(
        gpus=tuple(",".join(devices[i] for i in gpus) for gpus in servers),
        shared=split.shared,
        keeps_base=split.keeps_base and len(slots) == split.num_processes,  # fewer processes need more memory each
        reason=split.reason,
    )


def num_gpus(config: Config) -> int:
    """Number of GPUs available to the run according to `hardware.device`.

    Raises:
        UserError: it names a device that does not exist.
    """
    device = config.hardware.device
    found = 0 if device == "cpu" else torch.cuda.device_count()
    if device.startswith("cuda") and found <= int(device.partition(":")[2] or 0):
        raise UserError(f"hardware.device: {device!r}: this machine has {found} CUDA devices; use auto or cpu")
    return 1 if ":" in device else found


def visible_devices(config: Config) -> list[str]:
    """GPUs available to the run, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    number = config.hardware.device.partition(":")[2]
    return [every[int(number)]] if number else every


def _check_several_machines(config: Config, num_here: int) -> None:
    """Check that rank 0's machine has GPUs without a rank for the run's own servers.

    Raises:
        UserError: it has none.
    """
    found, wanted = num_gpus(config), config.hardware.rollout_gpus
    if found == 0 or (found > num_here and wanted != "shared"):
        return
    raise UserError(
        f"hardware.rollout_gpus: {wanted} on several machines: servers run on the machine of rank 0, where the "
        f"launcher has started {num_here} processes on {found} GPUs; use rollout.urls with servers on other machines "
        f"(`cohort serve` starts one, `cohort launch slurm --rollout-nodes 1` a node of them)"
        + (f", or --nproc-per-node {found - 1}" if found > 1 else "")
    )


def _shape(path: str) -> ModelShape | None:
    """Shape of the model; None if it is unknown and not on this machine yet."""
    known = try_read_shape(path)
    if known is not None:
        return known
    from cohort.models.loading.meta_device import local_weights  # slow import, needed only for unknown names

    weights = local_weights(path)
    if not weights:
        return None
    folder = next(iter(weights.values())).file.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    number = sum(math.prod(w.shape) for w in weights.values())
    return try_read_shape(str(folder)) or similar_shape(config, name=path, num_parameters=number)


def _hardware(num: int) -> Hardware | None:
    """GPUs of this machine; None if the driver does not answer."""
    gpu = _query_gpu()
    if gpu is None:
        return None
    name, memory_bytes = gpu
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=memory_bytes,
        gpus_per_node=num,
        nodes=1,
    )


@functools.cache
def _query_gpu() -> tuple[str, int] | None:
    """Name of the first GPU and memory of the smallest; None if the driver does not answer.

    Runs in a subprocess, since querying CUDA allocates GPU memory for the lifetime of the process.
    """
    script = (
        "import torch\n"
        "found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
        "print(found[0].name, min(gpu.total_memory for gpu in found), sep='\\n')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_QUERY_GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    name, memory_bytes = done.stdout.strip().splitlines()[-2:]
    return name, int(memory_bytes)


def choose_engine(config: Config, notify: Callable[[str], None]) -> Config:
    """Resolve `rollout.engine: auto`: the engine of the run in `run.dir`, else vLLM if possible.

    Args:
        config: configuration of the run.
        notify: called with the choice and its reason, except on a machine without GPUs.

    Raises:
        UserError: the configuration is incompatible with the engine.
    """
    if config.rollout.engine != "auto":
        return config
    engine, why = _chosen(config)
    if why is not None:
        notify(f"rollout.engine: auto: {engine}, {why}")
    return set_engine(config, engine)


def _chosen(config: Config) -> tuple[str, str | None]:
    """Name of the engine, and the reason in words."""
    begun = _engine_of_run(Path(config.run.dir))
    if num_gpus(config) == 0:
        return begun or "local", None
    if begun is not None:
        return begun, "as when the run started"
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "local", "since vLLM needs dedicated nodes or servers on several machines (rollout.urls)"
    if (reason := vllm_incompatibility(config)) is not None:
        return "local", f"since vLLM does not support this run: {reason}"
    try:
        version = check_vllm(vllm_python(None))
    except UserError:
        if config.hardware.rollout_gpus != "auto" or "COHORT_VLLM_PYTHON" in os.environ:
            raise  # both request vLLM
        return (
            "local",
            f"since {sys.executable} has no usable vLLM (set COHORT_VLLM_PYTHON to an environment that has)",
        )
    if (problem := vllm_memory_shortfall(config)) is not None:
        return "local", f"since vLLM does not fit alongside training: {problem}"
    return "vllm", f"since vLLM {version} is installed"


def _engine_of_run(folder: Path) -> str | None:
    """Engine that the run in `folder` started with; None without a readable run."""
    if not is_run_folder(folder) or not has_progress(folder):
        return None
    try:
        engine = load_config(folder / "config.yaml").rollout.engine
    except UserError:
        return None
    return None if engine == "auto" else engine
