"""Choose the engine of `rollout.engine: auto` on this machine."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from cohort.config import Config
from cohort.config.rollout import AutoRolloutConfig, preferred_servers
from cohort.errors import UserError
from cohort.plan.rollout_engine import incompatibility, servers_shortfall, set_engine
from cohort.rollout.engines import servers_setup
from cohort.rollout.engines.servers.placement import model_shape, num_gpus, this_hardware
from cohort.run.files import recorded_config


def choose_engine(config: Config, notify: Callable[[str], None]) -> Config:
    """Resolve `rollout.engine: auto`: the engine of the run in `run.dir`, else the preferred servers if possible.

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
    recorded = recorded_config(Path(config.run.dir))
    begun = None if recorded is None or recorded.rollout.engine == "auto" else recorded.rollout.engine
    if num_gpus(config) == 0:
        return begun or "local", None
    if begun is not None:
        return begun, "as when the run started"
    engine, servers = AutoRolloutConfig.prefers, preferred_servers()
    program, python = servers.program, servers.python_variable
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "local", f"since {program} needs dedicated nodes or servers on several machines (rollout.urls)"
    if (reason := incompatibility(config)) is not None:
        return "local", f"since {program} does not support this run: {reason}"
    try:
        version = servers_setup(engine).find_program(set_engine(config, engine))
    except UserError:
        if config.hardware.rollout_gpus != "auto" or python in os.environ:
            raise  # both request servers
        return "local", f"since {sys.executable} has no usable {program} (set {python} to an environment that has)"
    if (problem := _memory_shortfall(config)) is not None:
        return "local", f"since {program} does not fit alongside training: {problem}"
    return engine, f"since {program} {version} is installed"


def _memory_shortfall(config: Config) -> str | None:
    """Why the preferred servers do not fit alongside training on this machine; None if they fit or it is unknown.

    Raises:
        UserError: the configuration requires GPUs that this machine does not have.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE")  # set by another launcher, which decides the number of processes
    if started is not None:
        config = config.model_copy(update={"hardware": config.hardware.model_copy(update={"processes": int(started)})})
    shape, hardware = model_shape(config.model.path), this_hardware(num_gpus(config))
    return None if shape is None or hardware is None else servers_shortfall(config, shape, hardware)
