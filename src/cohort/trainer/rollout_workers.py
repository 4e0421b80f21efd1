"""Choose how many processes run the trajectories of a run with servers (`rollout.workers`), and on which nodes."""

import pickle
import secrets
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from cohort.config import Config, ServersConfig
from cohort.config.objects import unnamed_objects
from cohort.errors import describe_error
from cohort.ranks.worker_group import WorkerGroup
from cohort.rewards import read_trajectories
from cohort.rollout.workers.nodes import LOOPBACK, Place
from cohort.sandbox.pool import default_concurrency
from cohort.trainer.parts import Parts
from cohort.trainer.worker import Worker

_TRAJECTORIES_PER_WORKER = 512  # at once; about what one event loop keeps up with (docs/benchmarks.md)
_MAX_WORKERS = 16  # of 0.3 GB each with tools, on each node


def choose_workers(
    config: Config, parts: Parts, *, free_cores: Mapping[int, int], notify: Callable[[str], None]
) -> dict[int, int]:
    """Return how many processes run trajectories, by the first rank of their node. Say so if they are several.

    Args:
        config: configuration of a run whose engine has servers.
        parts: objects of the run.
        free_cores: cores that neither ranks nor servers of this run use, by the first rank of their node.
        notify: shows a message to the user.

    Returns:
        At least one process on rank 0's node; none for an event loop in this process.
    """
    rollout = config.rollout
    assert isinstance(rollout, ServersConfig)
    at_once = config.train.prompts_per_step * rollout.num_generations * (1 + rollout.max_staleness)
    wanted, useful, where = rollout.workers, at_once // _TRAJECTORIES_PER_WORKER, ""
    if (useful if wanted == "auto" else wanted) < 2:
        return {}
    if (reason := _needs_this_process(config, parts)) is not None:
        if wanted != "auto":
            notify(f"rollout.workers: {wanted}: all trajectories run in this process: {reason}")
        return {}
    if len(free_cores) > 1 and (not rollout.urls or any(urlsplit(url).hostname in LOOPBACK for url in rollout.urls)):
        free_cores, where = {0: free_cores[0]}, " on rank 0's node, whose servers other nodes do not reach"
    if wanted == "auto":
        share = min(-(-useful // len(free_cores)), _MAX_WORKERS)  # in equal shares
        numbers = {rank: min(share, free) for rank, free in free_cores.items() if free > 0 or rank == 0}
        numbers[0] = max(1, numbers[0])  # which no other node's end takes away
    else:
        numbers = dict.fromkeys(free_cores, wanted)
    if sum(numbers.values()) < 2:
        return {}
    if len(numbers) > 1:
        least, most = min(numbers.values()), max(numbers.values())
        where = f" on {len(numbers)} nodes, {least if least == most else f'{least} to {most}'} each"
    notify(f"trajectories run in {sum(numbers.values())} processes{where} (rollout.workers)")
    return numbers


def places_elsewhere(workers: WorkerGroup[Worker], numbers: Mapping[int, int]) -> list[Place]:
    """Prepare the other nodes and return places for their rollout workers.

    Args:
        workers: all ranks.
        numbers: of rollout workers, by the first rank of their node.

    Raises:
        TrainingError: a node cannot run any.
    """
    if not (others := set(numbers) - {0}):
        return []
    nodes = enumerate(workers.call(Worker.host_rollout_workers, others, secrets.token_bytes(32)))
    found = [(node, numbers[rank]) for rank, node in nodes if node is not None]
    return [Place(index=index, names=node.names, node=node) for node, number in found for index in range(number)]


def sendable_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that another process can unpickle; None if it must load its own, with the model's code."""
    return None if type(tokenizer).__module__.startswith("transformers_modules") else tokenizer


def share_sandbox(config: Config, num_workers: int) -> Config:
    """Return the configuration of one of a node's workers, which may use its share of the sandbox's processes."""
    most = config.sandbox.max_concurrent
    share = max(1, (default_concurrency() if most == "auto" else most) // num_workers)
    return config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"max_concurrent": share})})


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
