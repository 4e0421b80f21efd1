"""Choose how many processes run the trajectories of a run with servers (`rollout.workers`)."""

import os
import pickle
from collections.abc import Callable
from typing import Any

from cohort.config import Config, ServersConfig
from cohort.config.objects import unnamed_objects
from cohort.errors import describe_error
from cohort.processes.this_process import usable_cores
from cohort.rewards import read_trajectories
from cohort.sandbox.pool import default_concurrency
from cohort.trainer.parts import Parts

_TRAJECTORIES_PER_WORKER = 512  # at once; about what one event loop keeps up with (docs/benchmarks.md)
_MAX_WORKERS = 16  # of 0.3 GB each with tools


def choose_num_workers(config: Config, parts: Parts, *, num_own_servers: int, notify: Callable[[str], None]) -> int:
    """Return how many processes run trajectories; 1 for an event loop in this process. Say so if they are several.

    Args:
        config: configuration of a run whose engine has servers.
        parts: objects of the run.
        num_own_servers: servers that the run has started.
        notify: shows a message to the user.
    """
    assert isinstance(config.rollout, ServersConfig)
    wanted = config.rollout.workers
    number = _automatic(config, config.rollout, num_own_servers) if wanted == "auto" else wanted
    if number < 2:
        return 1
    if (reason := _needs_this_process(config, parts)) is not None:
        if wanted != "auto":
            notify(f"rollout.workers: {wanted}: all trajectories run in this process: {reason}")
        return 1
    notify(f"trajectories run in {number} processes (rollout.workers)")
    return number


def sendable_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that another process can unpickle; None if it must load its own, with the model's code."""
    return None if type(tokenizer).__module__.startswith("transformers_modules") else tokenizer


def share_sandbox(config: Config, num_workers: int) -> Config:
    """Return the configuration of a worker, which may use its share of the sandbox's processes."""
    most = config.sandbox.max_concurrent
    share = max(1, (default_concurrency() if most == "auto" else most) // num_workers)
    return config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"max_concurrent": share})})


def _automatic(config: Config, rollout: ServersConfig, num_own_servers: int) -> int:
    """One process per 512 trajectories at once, while there are cores that nothing else of the run uses."""
    steps = 1 + rollout.max_staleness
    at_once = config.train.prompts_per_step * rollout.num_generations * steps
    free_cores = usable_cores() - int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - num_own_servers
    return min(at_once // _TRAJECTORIES_PER_WORKER, free_cores, _MAX_WORKERS)


def _needs_this_process(config: Config, parts: Parts) -> str | None:
    """Return why trajectories cannot run in other processes, or None."""
    for field, name in unnamed_objects(config.rollout, "rollout"):
        return f"{field} ({name}) exists in it only; define it at the top level of a file"
    if config.rollout.has_turns and read_trajectories(parts.rewards):
        return "a reward function takes `trajectories` or `environments`, which exist in it only"
    if type(parts.tokenizer).__module__ == "__main__":
        return "the class of the tokenizer is defined in the script; define it in a module"
    try:
        pickle.dumps(sendable_tokenizer(parts.tokenizer))
    except Exception as error:
        return f"the tokenizer cannot be sent to another process ({describe_error(error)})"
    return None
