"""Resolve `rollout.engine: auto`: what vLLM does not support, and whether it fits alongside training."""

from cohort.config import Config
from cohort.config.load import config_from_dict
from cohort.config.rollout import LOWEST_TEMPERATURE
from cohort.errors import UserError
from cohort.plan.hardware import Hardware
from cohort.plan.shape import ModelShape, RequestedAdapter, requested_adapter
from cohort.plan.split import NoSplitFitsError, memory_shortfall, split_gpus

_LARGEST_RANK = 512  # vLLM's limit
_NOT_SERVED = ("embed_tokens", "lm_head")  # vLLM supports adapters on these for few models only


def set_engine(config: Config, engine: str) -> Config:
    """Replace `rollout.engine: auto` by `engine`; an explicit engine stays.

    Raises:
        UserError: the configuration is incompatible with the engine.
    """
    if config.rollout.engine != "auto":
        return config
    settings = config.model_dump()
    return config_from_dict({**settings, "rollout": {**settings["rollout"], "engine": engine}})


def plan_engine(
    config: Config, shape: ModelShape | None = None, hardware: Hardware | None = None
) -> tuple[Config, str | None]:
    """Resolve the engine as a GPU run with vLLM installed would, and say why it is not vLLM.

    Args:
        config: configuration of the run.
        shape: shape of its model; without it or `hardware`, memory is not checked.
        hardware: hardware that it runs on.

    Returns:
        The configuration, and why the engine is not vLLM (None if it is).

    Raises:
        UserError: the configuration contradicts itself or the hardware.
    """
    if config.rollout.engine != "auto":
        return config, None
    reason = vllm_incompatibility(config)
    if reason is None and shape is not None and hardware is not None:
        problem = vllm_memory_shortfall(config, shape, hardware)
        reason = None if problem is None else f"vLLM does not fit alongside training: {problem}"
    return set_engine(config, "vllm" if reason is None else "local"), reason


def vllm_incompatibility(config: Config) -> str | None:
    """Why vLLM cannot be the engine of a configuration with `rollout.engine: auto`; None if it can.

    Raises:
        UserError: the adapter of `model.adapter.path` cannot be read.
    """
    adapter = config.model.adapter
    reason = vllm_sampling_limit(config, None if adapter is None else requested_adapter(adapter))
    if reason is not None:
        return reason
    try:
        set_engine(config, "vllm")
    except UserError as error:
        return str(error)
    return None


def vllm_sampling_limit(config: Config, adapter: RequestedAdapter | None) -> str | None:
    """Sampling settings or adapters that vLLM does not support, with an alternative; None if it supports all.

    Args:
        config: configuration of the run, with any engine.
        adapter: the policy's adapter, as configured or as loaded.
    """
    temperatures = {"rollout": config.rollout.temperature, "eval": config.eval.temperature if config.eval else 0.0}
    for section, temperature in temperatures.items():
        if 0 < temperature < LOWEST_TEMPERATURE:
            return f"{section}.temperature: {temperature:g} is below vLLM's minimum; use {LOWEST_TEMPERATURE:g} or more"
    if adapter is None:
        return None
    if adapter.dora:
        return "model.adapter.dora: true: vLLM supports plain LoRA only; use dora: false"
    if adapter.rank > _LARGEST_RANK:
        return f"model.adapter.rank: {adapter.rank} exceeds vLLM's maximum; use at most {_LARGEST_RANK}"
    outside = [name for name in adapter.modules if name.rpartition(".")[-1] in _NOT_SERVED]
    if outside:
        return f"model.adapter.targets: {', '.join(outside)}: vLLM supports adapters inside layers only; use all-linear"
    return None


def vllm_memory_shortfall(config: Config, shape: ModelShape, hardware: Hardware) -> str | None:
    """Why vLLM and training do not fit according to the plan; None if they do.

    An explicit `hardware.rollout_gpus` is not questioned. With several nodes, one samples.

    Args:
        config: configuration of a run that vLLM supports.
        shape: shape of its model.
        hardware: hardware that it runs on.

    Raises:
        UserError: the configuration contradicts itself or the hardware.
    """
    config = set_engine(config, "vllm")
    if config.hardware.rollout_gpus != "auto":
        return None
    if hardware.nodes > 1:
        return memory_shortfall(config, shape, hardware, (hardware.nodes - 1) * hardware.gpus_per_node)
    try:
        split = split_gpus(config, num_gpus=hardware.gpus_per_node, shape=shape, hardware=hardware)
    except NoSplitFitsError as error:
        return str(error)
    return memory_shortfall(config, shape, hardware, split.num_processes, shared=split.shared)
