"""Which GPUs the rollout servers of a run get on this machine: decided where the run is started, and told to rank 0."""

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
from cohort.plan import rollout_engine
from cohort.plan.calibration import calibration_of
from cohort.plan.hardware import Hardware
from cohort.plan.shape import ModelShape, known_shape, similar_shape
from cohort.plan.split import GpuSplit, split_gpus

PLACEMENT = "COHORT_SERVER_GPUS"  # environment variable: a Placement as JSON
_LOOK_AT_GPU_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The servers that a run starts, in the words of the machine and not of any one process."""

    gpus: tuple[str, ...]  # of each server, as CUDA_VISIBLE_DEVICES takes them, such as "6,7"; "" on CPU
    shared: bool  # server i is on the GPU of rank i, which has to let it sleep
    reason: str  # for a person

    def environment(self) -> dict[str, str]:
        """The variable that tells it to the processes that train."""
        return {PLACEMENT: json.dumps(asdict(self))}


def server_placement(config: Config) -> Placement:
    """Where this run's servers go. On rank 0, which starts them.

    `cohort train` has told it to its processes. Those of another launcher see which GPUs of their machine no rank uses.

    Args:
        config: of a run that uses servers, without `rollout.urls`.

    Raises:
        UserError: there are no GPUs for them.
    """
    if PLACEMENT in os.environ:
        told = json.loads(os.environ[PLACEMENT])
        return Placement(gpus=tuple(told["gpus"]), shared=told["shared"], reason=told["reason"])
    num_here, num_all = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    if num_all > num_here:
        _check_several_machines(config, num_here)
    hardware = config.hardware.model_copy(update={"processes": num_here})
    split = split_machine(config.model_copy(update={"hardware": hardware}))
    assert split is not None
    return place(config, split, list(range(num_here)))


def split_machine(config: Config) -> GpuSplit | None:
    """How the GPUs of this machine are split; None for a run that starts no servers.

    Raises:
        UserError: the configuration asks for what this machine does not have.
    """
    if not config.rollout.uses_servers or config.rollout.urls:
        return None
    num = num_gpus(config)
    decides = config.hardware.rollout_gpus == config.hardware.processes == "auto" and num > 1
    return split_gpus(
        config,
        num_gpus=num,
        shape=_shape(config.model.path) if decides else None,
        hardware=_hardware(num) if decides else None,
    )


def why_vllm_does_not_fit(config: Config) -> str | None:
    """Why servers do not fit beside training here by the plan; None where they do, or where that cannot be told.

    Args:
        config: of a run with `rollout.engine: auto` that vLLM is not ruled out for.

    Raises:
        UserError: the configuration asks for what this machine does not have.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by another launcher, which decides how many processes train
    if started is not None:
        config = config.model_copy(update={"hardware": config.hardware.model_copy(update={"processes": int(started)})})
    shape, hardware = _shape(config.model.path), _hardware(num_gpus(config))
    return None if shape is None or hardware is None else rollout_engine.why_vllm_does_not_fit(config, shape, hardware)


def place(config: Config, split: GpuSplit, slots: list[int]) -> Placement:
    """A split in the words of the machine.

    Args:
        config: of the run.
        split: of this machine.
        slots: places in `split.training_gpus` that are trained on; a failed one may have been left out.
    """
    devices = visible_devices(config)
    # nobody trains on a shared GPU that was left out, and a server there would have no one to take turns with
    servers = [split.server_gpus[slot] for slot in slots] if split.shared else split.server_gpus
    return Placement(
        gpus=tuple(",".join(devices[i] for i in gpus) for gpus in servers),
        shared=split.shared,
        reason=split.reason,
    )


def num_gpus(config: Config) -> int:
    """How many GPUs this machine has for the run, as `hardware.device` says.

    Raises:
        UserError: it names one that does not exist.
    """
    device = config.hardware.device
    found = 0 if device == "cpu" else torch.cuda.device_count()
    if device.startswith("cuda") and found <= int(device.partition(":")[2] or 0):
        raise UserError(f"hardware.device: {device!r}: this machine has {found} CUDA devices; use auto or cpu")
    return 1 if ":" in device else found


def visible_devices(config: Config) -> list[str]:
    """The GPUs that the run may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    number = config.hardware.device.partition(":")[2]
    return [every[int(number)]] if number else every


def _check_several_machines(config: Config, num_here: int) -> None:
    """Servers of the run itself are on rank 0's machine, on GPUs that no rank uses.

    Raises:
        UserError: there are none.
    """
    found, wanted = num_gpus(config), config.hardware.rollout_gpus
    if found == 0 or (found > num_here and wanted != "shared"):
        return
    raise UserError(
        f"hardware.rollout_gpus: {wanted} on several machines: the servers would be on the machine of rank 0, and the "
        f"launcher has started {num_here} processes on its {found} GPUs; use rollout.urls with servers on other "
        f"machines (`cohort serve` starts one, `cohort launch slurm --rollout-nodes 1` a node of them)"
        + (f", or --nproc-per-node {found - 1}" if found > 1 else "")
    )


def _shape(path: str) -> ModelShape | None:
    """Of the model; None where it is not known and not on this machine yet."""
    known = known_shape(path)
    if known is not None:
        return known
    from cohort.policy.skeleton import local_weights  # slow to import, and needed for what the name does not tell only

    weights = local_weights(path)
    if not weights:
        return None
    folder = next(iter(weights.values())).file.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # what is wrong with it, loading the model says
    number = sum(math.prod(w.shape) for w in weights.values())
    return known_shape(str(folder)) or similar_shape(config, name=path, num_parameters=number)


def _hardware(num: int) -> Hardware | None:
    """The GPUs of this machine; None where the driver does not answer."""
    gpu = _look_at_gpu()
    if gpu is None:
        return None
    name, memory_bytes = gpu
    return Hardware(
        gpu_name=name,
        gpu_memory_bytes=memory_bytes,
        gpus_per_node=num,
        nodes=1,
        measured=calibration_of(name),
    )


@functools.cache
def _look_at_gpu() -> tuple[str, int] | None:
    """Name of the first GPU, and the memory of the one that has the least; None where the driver does not tell.

    In a process of its own: whoever asks CUDA holds memory of the GPU from then on, and this one may outlive the run.
    """
    script = (
        "import torch\n"
        "found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
        "print(found[0].name, min(gpu.total_memory for gpu in found), sep='\\n')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_LOOK_AT_GPU_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    name, memory_bytes = done.stdout.strip().splitlines()[-2:]
    return name, int(memory_bytes)
