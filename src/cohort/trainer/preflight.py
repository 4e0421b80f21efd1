"""Preflight check: refuse a run that cannot fit into GPU memory, before weights are loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cohort.config import Config
from cohort.errors import UserError
from cohort.metrics.resources import resident_now
from cohort.plan.advice import advise
from cohort.plan.defaults import checkpointing, with_checkpointing
from cohort.plan.hardware import Hardware, local_cpu
from cohort.plan.layout import GpuLayout
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import read_shape
from cohort.ranks.collectives import Ranks
from cohort.rollout.engines.setup import EngineSetup
from cohort.run.files import recorded_config
from cohort.trainer.inputs import Inputs

_MARGIN = 1.1  # predictions are accurate to about 10 %


def preflight(
    config: Config,
    inputs: Inputs,
    setup: EngineSetup,
    *,
    device: torch.device,
    ranks: Ranks,
    notify: Callable[[str], None],
) -> Plan | None:
    """Plan the run like `cohort plan`, on this hardware; None if the shape of the model or its adapter is unknown.

    On CPU no run is refused, since the operating system decides how much memory a process gets.

    Args:
        config: configuration of the run.
        inputs: data of the run, whose longest prompt may be shorter than the configured maximum.
        setup: setup of the rollout engine, whose servers may share the training GPUs.
        device: device of this rank; all ranks have the same GPU model.
        ranks: training processes.
        notify: shows a message to the user.

    Raises:
        UserError: the run cannot fit, and `run.ignore_plan` is not set.
    """
    return preflight_on(
        config,
        _hardware(device, ranks),
        shared=setup.shares_gpus,
        keeps_base=setup.keeps_base,
        longest_prompt_tokens=inputs.longest_prompt_tokens,
        num_prompts=len(inputs.prompts.prompts),
        notify=notify,
    )


def choose_checkpointing(
    config: Config, inputs: Inputs, setup: EngineSetup, *, device: torch.device, ranks: Ranks
) -> tuple[Config, list[str]]:
    """Resolve `model.gradient_checkpointing: auto`: as the run in `run.dir` did if that fits, else by the plan.

    Arguments are those of `preflight`.

    Returns:
        The configuration, and notes for the user.
    """
    if config.model.gradient_checkpointing != "auto":
        return config, []
    return choose_checkpointing_on(
        config,
        _hardware(device, ranks),
        shared=setup.shares_gpus,
        keeps_base=setup.keeps_base,
        longest_prompt_tokens=inputs.longest_prompt_tokens,
    )


def choose_checkpointing_on(
    config: Config, hardware: Hardware, *, shared: bool, keeps_base: bool, longest_prompt_tokens: int
) -> tuple[Config, list[str]]:
    """Resolve `model.gradient_checkpointing: auto` for given hardware; see `choose_checkpointing`."""
    recorded = recorded_config(Path(config.run.dir))
    layout = _layout_as_launched(config, hardware, shared=shared, keeps_base=keeps_base)
    wanted = _with_prompts(config, longest_prompt_tokens)

    def predict(config: Config) -> Plan:
        return predict_run(config, read_shape(config.model.path), hardware, layout=layout)

    kept = None if recorded is None else checkpointing(recorded.model)
    try:
        if kept is not None and (not hardware.on_gpu or predict(with_checkpointing(wanted, kept)).fits):
            kind, why = kept, f"{str(kept).lower()}, as when the run started"
        else:  # the first choice, or the hardware has changed
            plan = predict(wanted)
            kind, why = checkpointing(plan.config.model), plan.chosen_checkpointing or ""
            if kept is not None and kept != kind:
                why += f" (the run started with {str(kept).lower()}, which does not fit here)"
    except UserError as error:
        kind = kept or False
        begun = "" if kept is None else ", as when the run started"
        why = f"{str(kind).lower()}{begun}, without a memory plan: {error}"
    notes = [f"model.gradient_checkpointing: auto: {why}"] if hardware.on_gpu else []
    return with_checkpointing(config, kind), notes


def _hardware(device: torch.device, ranks: Ranks) -> Hardware:
    if device.type != "cuda":
        return local_cpu(ranks.world_size, resident_bytes=resident_now())
    per_node = ranks.ranks_per_node or ranks.world_size
    if ranks.world_size % per_node:
        per_node = ranks.world_size
    properties = torch.cuda.get_device_properties(device)
    return Hardware(
        gpu_name=properties.name,
        gpu_memory_bytes=properties.total_memory,
        gpus_per_node=per_node,
        nodes=ranks.world_size // per_node,
    )


def preflight_on(
    config: Config,
    hardware: Hardware,
    *,
    shared: bool,
    keeps_base: bool = False,
    longest_prompt_tokens: int,
    num_prompts: int,
    notify: Callable[[str], None],
) -> Plan | None:
    """Run the preflight check for given hardware; see `preflight`."""
    wanted = _with_prompts(config, longest_prompt_tokens)
    layout = _layout_as_launched(config, hardware, shared=shared, keeps_base=keeps_base)
    try:
        shape = read_shape(config.model.path)
        plan = predict_run(wanted, shape, hardware, num_prompts=num_prompts, layout=layout)
        if hardware.on_gpu and not plan.fits:  # the token budget shrinks when memory runs out
            train = wanted.train.model_copy(update={"micro_batch_tokens": "auto"})
            shrunk = wanted.model_copy(update={"train": train})
            plan = predict_run(shrunk, shape, hardware, num_prompts=num_prompts, layout=layout)
    except UserError as error:
        if hardware.on_gpu:
            notify(f"no memory plan: {error}")
        return None
    if not hardware.on_gpu or plan.memory.peak_bytes <= _MARGIN * hardware.gpu_memory_bytes:
        return plan
    needed = (
        f"{plan.memory.peak_bytes / 1e9:.1f} GB per GPU during {plan.memory.peak_phase}, but GPUs have "
        f"{hardware.gpu_memory_bytes / 1e9:.1f} GB"
    )
    if config.run.ignore_plan:
        notify(f"warning: this run is predicted to need {needed}; continuing because of run.ignore_plan: true")
        return plan
    ways = [advice.as_arguments() for advice in advise(plan)][:3]
    raise UserError(
        f"hardware: this run needs {needed}, even with the smallest micro-batches; use "
        f"{' or '.join(ways) or 'more GPUs or a smaller model'}, or set run.ignore_plan: true to try anyway"
    )


def _with_prompts(config: Config, longest_tokens: int) -> Config:
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": longest_tokens})
    return config.model_copy(update={"rollout": rollout})


def _layout_as_launched(config: Config, hardware: Hardware, *, shared: bool, keeps_base: bool) -> GpuLayout:
    samples_itself = not config.rollout.uses_servers
    return GpuLayout(
        num_training=hardware.num_gpus,
        num_sampling=hardware.num_gpus if shared or samples_itself else 0,
        shared=shared or samples_itself,
        keeps_base=keeps_base,
        reason="as launched",
    )


def compare_memory(plan: Plan, peaks: Mapping[int, float], reserved: Mapping[int, float]) -> str | None:
    """Compare predicted with measured memory in a message; None before the first step was measured.

    Args:
        plan: predicted memory.
        peaks: `memory/peak_bytes` by step: allocated by PyTorch on GPU, resident on CPU.
        reserved: `memory/reserved_peak_bytes` by step; empty on CPU.
    """
    if not peaks:
        return None
    parts = plan.memory.phases[plan.memory.peak_phase]
    framework = parts.get("framework", 0)
    outside = (
        framework + parts.get("rollout server's base", 0) if plan.hardware.on_gpu else 0
    )  # not PyTorch's in this process
    measured, predicted = max(peaks.values()), plan.memory.peak_bytes - outside
    before = "" if plan.hardware.on_gpu else f" ({framework / 1e9:.2f} GB before loading the model)"
    if reserved:
        before = f" ({max(reserved.values()) / 1e9:.2f} GB with fragments of PyTorch's allocator)"
    difference = f"{abs(predicted / measured - 1):.0%} {'more' if predicted > measured else 'less'}"
    return (
        f"peak memory per process: {measured / 1e9:.2f} GB{before}; predicted {predicted / 1e9:.2f} GB for sequences "
        f"of maximum length, {difference}"
    )
