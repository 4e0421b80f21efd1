"""Resolve `rollout.engine: auto`: what its preferred servers do not support, and whether they fit beside training."""

from cohort.config import Config
from cohort.config.load import config_from_dict
from cohort.config.rollout import AutoRolloutConfig, ServersConfig, preferred_servers
from cohort.errors import UserError
from cohort.plan.adapter import RequestedAdapter, requested_adapter
from cohort.plan.hardware import Hardware
from cohort.plan.shape import ModelShape
from cohort.plan.split import NoSplitFitsError, memory_shortfall, split_gpus


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
    """Resolve the engine as a GPU run does whose preferred servers are installed, and say why it is another one.

    Args:
        config: configuration of the run.
        shape: shape of its model; without it or `hardware`, memory is not checked.
        hardware: hardware that it runs on.

    Returns:
        The configuration, and why the engine is not the preferred one (None if it is).

    Raises:
        UserError: the configuration contradicts itself or the hardware.
    """
    if config.rollout.engine != "auto":
        return config, None
    reason = incompatibility(config)
    if reason is None and shape is not None and hardware is not None:
        problem = servers_shortfall(config, shape, hardware)
        if problem is not None:
            reason = f"{preferred_servers().program} does not fit alongside training: {problem}"
    return set_engine(config, AutoRolloutConfig.prefers if reason is None else "local"), reason


def incompatibility(config: Config) -> str | None:
    """Why the preferred servers cannot sample a run with `rollout.engine: auto`; None if they can.

    Raises:
        UserError: the adapter of `model.adapter.path` cannot be read.
    """
    adapter = config.model.adapter
    requested = None if adapter is None else requested_adapter(adapter)
    reason = sampling_limit(config, requested, servers=preferred_servers())
    if reason is not None:
        return reason
    try:
        set_engine(config, AutoRolloutConfig.prefers)
    except UserError as error:
        return str(error)
    return None


def sampling_limit(config: Config, adapter: RequestedAdapter | None, *, servers: type[ServersConfig]) -> str | None:
    """Sampling settings or adapters that servers do not support, with an alternative; None if they support all.

    Args:
        config: configuration of the run, with any engine.
        adapter: the policy's adapter, as configured or as loaded.
        servers: class of the engine on servers.
    """
    limits, program = servers.limits, servers.program
    lowest, largest_rank = limits.lowest_temperature, limits.largest_adapter_rank
    for name, section in (("rollout", config.rollout), ("eval", config.eval)):
        if section is None:
            continue
        if 0 < section.temperature < lowest:
            return f"{name}.temperature: {section.temperature:g} is below {program}'s minimum; use {lowest:g} or more"
        for key in limits.unserved_sampling:
            off = type(section).model_fields[key].default
            if (value := getattr(section, key)) != off:
                return f"{name}.{key}: {value:g} is not supported by {program}; use {off:g}, which is off"
    if adapter is None:
        return None
    if adapter.dora and not limits.serves_dora:
        return f"model.adapter.dora: true: {program} supports plain LoRA only; use dora: false"
    if largest_rank is not None and adapter.rank > largest_rank:
        return f"model.adapter.rank: {adapter.rank} exceeds {program}'s maximum; use at most {largest_rank}"
    outside = [name for name in adapter.modules if name.rpartition(".")[-1] in limits.unserved_targets]
    if outside:
        return (
            f"model.adapter.targets: {', '.join(outside)}: {program} supports adapters inside layers only; use "
            f"all-linear"
        )
    return None


def servers_shortfall(config: Config, shape: ModelShape, hardware: Hardware) -> str | None:
    """Why the preferred servers and training do not fit according to the plan; None if they do.

    An explicit `hardware.rollout_gpus` is not questioned. With several nodes, one samples.

    Args:
        config: configuration of a run that these servers support.
        shape: shape of its model.
        hardware: hardware that it runs on.

    Raises:
        UserError: the configuration contradicts itself or the hardware.
    """
    config = set_engine(config, AutoRolloutConfig.prefers)
    if config.hardware.rollout_gpus != "auto":
        return None
    if hardware.nodes > 1:
        return memory_shortfall(config, shape, hardware, (hardware.nodes - 1) * hardware.gpus_per_node)
    try:
        split = split_gpus(config, num_gpus=hardware.gpus_per_node, shape=shape, hardware=hardware)
    except NoSplitFitsError as error:
        return str(error)
    return memory_shortfall(config, shape, hardware, split.num_processes, shared=split.shared)
