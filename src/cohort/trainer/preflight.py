"""The plan of a run that is about to start, on what it has: what cannot fit on GPUs is refused before weights load."""

from collections.abc import Callable, Mapping

import torch

from cohort.config import Config
from cohort.errors import UserError
from cohort.metrics.peak_memory import resident_now
from cohort.plan.advice import advise
from cohort.plan.calibration import find_calibration
from cohort.plan.hardware import Hardware, local_cpu
from cohort.plan.layout import Layout
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import read_shape
from cohort.trainer.rollout_engines import EngineSetup
from cohort.trainer.run_inputs import Inputs

_MARGIN = 1.1  # the closed form is good to a tenth


def foresee(
    config: Config,
    inputs: Inputs,
    setup: EngineSetup,
    *,
    device: torch.device,
    world_size: int,
    note: Callable[[str], None],
) -> Plan | None:
    """Plan the run as `cohort plan` does; None where the shape of the model or its adapter is not known.

    On CPU nothing is refused or said: the system decides what a process may have.

    Args:
        config: of the run.
        inputs: the longest prompt may be shorter than what the configuration allows.
        setup: of the rollout engine, whose servers may sleep on the training GPUs.
        device: of this rank; all have the same GPU.
        world_size: training processes.
        note: takes a sentence for a person.

    Raises:
        UserError: it cannot fit, and `run.ignore_plan` is not set.
    """
    return plan_on(
        config,
        _gpus(device, world_size) if device.type == "cuda" else local_cpu(world_size, resident_bytes=resident_now()),
        shared=setup.shares_gpus,
        longest_prompt_tokens=inputs.longest_sequence_tokens - inputs.plan.max_completion_tokens + 1,
        num_prompts=len(inputs.prompts.prompts),
        note=note,
    )


def _gpus(device: torch.device, world_size: int) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    return Hardware(
        gpu_name=properties.name,
        gpu_memory_bytes=properties.total_memory,
        gpus_per_node=world_size,
        nodes=1,
        calibration=find_calibration(properties.name),
    )


def plan_on(
    config: Config,
    hardware: Hardware,
    *,
    shared: bool,
    longest_prompt_tokens: int,
    num_prompts: int,
    note: Callable[[str], None],
) -> Plan | None:
    """As `foresee`, on hardware that is known."""
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": longest_prompt_tokens})
    smallest = config.model_copy(update={"rollout": rollout})
    if hardware.on_gpu:  # what does not fit is computed in parts, so that only the smallest budget has to
        train = config.train.model_copy(update={"micro_batch_tokens": "auto"})
        smallest = smallest.model_copy(update={"train": train})
    samples_itself = not config.rollout.uses_servers
    layout = Layout(
        num_training=hardware.num_gpus,
        num_sampling=hardware.num_gpus if shared or samples_itself else 0,
        shared=shared or samples_itself,
        reason="as it was started",
    )
    try:
        shape = read_shape(config.model.path)
        plan = predict_run(smallest, shape, hardware, num_prompts=num_prompts, layout=layout)
    except UserError as error:
        if hardware.on_gpu:
            note(f"no plan was made: {error}")
        return None
    if not hardware.on_gpu or plan.memory.peak_bytes <= _MARGIN * hardware.gpu_memory_bytes:
        return plan
    needed = (
        f"{plan.memory.peak_bytes / 1e9:.1f} GB of each GPU in {plan.memory.peak_phase}, and they have "
        f"{hardware.gpu_memory_bytes / 1e9:.1f} GB"
    )
    if config.run.ignore_plan:
        note(f"warning: by its plan the run needs {needed}; run.ignore_plan: true goes on all the same")
        return plan
    ways = [advice.as_arguments() for advice in advise(smallest, plan)][:3]
    nearest = f": {' or '.join(ways)}" if ways else ""
    raise UserError(
        f"hardware: this run needs {needed}, with the smallest micro-batches. Nearest changes that make it fit by the "
        f"same plan{nearest or ' are more GPUs or a smaller model'}; or set run.ignore_plan: true to try"
    )


def compared(plan: Plan, peaks: Mapping[int, float]) -> str | None:
    """Predicted against measured memory, for a person; None before any step was measured.

    Args:
        plan: of the run.
        peaks: `memory/peak_bytes` by step: of what PyTorch had allocated on a GPU, and resident on CPU.
    """
    if not peaks:
        return None
    framework = plan.memory.phases[plan.memory.peak_phase].get("framework", 0)
    measured, predicted = max(peaks.values()), plan.memory.peak_bytes - framework * plan.hardware.on_gpu
    before = "" if plan.hardware.on_gpu else f" ({framework / 1e9:.2f} GB before it had a model)"
    return (
        f"memory of one process: {measured / 1e9:.2f} GB at most{before}, predicted {predicted / 1e9:.2f} GB for "
        f"sequences of the longest length ({predicted / measured:.2f} x)"
    )
