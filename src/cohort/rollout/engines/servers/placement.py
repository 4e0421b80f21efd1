"""Place rollout servers on this machine's GPUs."""

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.hardware import Hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import ModelShape, similar_shape, try_read_shape
from cohort.plan.split import GpuSplit, split_gpus

PLACEMENT = "COHORT_SERVER_GPUS"  # environment variable: a Placement as JSON
_QUERY_GPU_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Servers that a run starts, with physical device ids."""

    gpus: tuple[str, ...]  # CUDA_VISIBLE_DEVICES of each server, such as "6,7"; "" on CPU
    shared: bool  # all of these GPUs have a rank, too; servers sleep while they train
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
    decides |= num > 0 and config.model.adapter is not None  # whether servers keep its base model
    shape = model_shape(config.model.path) if decides else None
    hardware = this_hardware(num) if decides else None
    if config.model.gradient_checkpointing == "auto" and shape is not None and hardware is not None:
        config = predict_run(config, shape, hardware).config  # as the run will resolve it
    return split_gpus(config, num_gpus=num, shape=shape, hardware=hardware)


def place(config: Config, split: GpuSplit, slots: list[int]) -> Placement:
    """Translate a split into physical device ids.

    Args:
        config: configuration of the run.
        split: split of this machine.
        slots: indices into `split.training_gpus` in use; a failed GPU may have been dropped.
    """
    devices = visible_devices(config)
    return Placement(
        gpus=tuple(",".join(devices[i] for i in gpus) for gpus in split.servers_beside(slots)),
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


def model_shape(path: str) -> ModelShape | None:
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


def this_hardware(num: int) -> Hardware | None:
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
