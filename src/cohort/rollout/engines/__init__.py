"""Rollout engines, which sample completions in the training processes or on servers.

Each is a folder here, its setup in the table below, and a configuration class in `cohort.config.rollout`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.rollout.engines.servers.setup import ServersSetup
    from cohort.rollout.engines.setup import EngineSetup

# The setup of each `rollout.engine`, imported when a run uses it. `auto` that nothing has resolved is local.
SETUPS = {
    "auto": "cohort.rollout.engines.local.setup:LocalSetup",
    "local": "cohort.rollout.engines.local.setup:LocalSetup",
    "object": "cohort.rollout.engines.object.setup:ObjectSetup",
    "vllm": "cohort.rollout.engines.vllm.setup:VllmSetup",
}


def engine_setup(engine: str) -> "type[EngineSetup]":
    """Return the setup class of an engine."""
    module, _, name = SETUPS[engine].partition(":")
    found: type[EngineSetup] = getattr(import_module(module), name)
    return found


def servers_setup(engine: str) -> "type[ServersSetup]":
    """Return the setup class of an engine whose configuration says `uses_servers`."""
    found: Any = engine_setup(engine)
    servers: type[ServersSetup] = found
    return servers
