"""What the tests of several ranks run in each of them: jobs by name, and rank 0 writes what came of them."""

import gc
import hashlib
import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import rank_adapter
import rank_critic
import rank_engine
import rank_loading
import rank_moe
import rank_offload
import rank_optimizer
import rank_rewards
import rank_saving
import rank_workers
from cohort.ranks.collectives import Ranks
from cohort.ranks.join import join_ranks, leave_ranks
from waiting import PATIENCE_S


def run_once_per_update(ranks: Ranks, name: str, *arguments: str) -> dict[str, Any]:
    """A job with gradients that are reduced in a step's last pass only."""
    with mock.patch.object(rank_engine, "load", partial(rank_engine.load, sync_each_micro_batch=False)):
        return JOBS[name](ranks, *arguments)


def run_replicated(ranks: Ranks, dp_replicate: str, name: str, *arguments: str) -> dict[str, Any]:
    """A job on so many copies of the model: what it returns on rank 0, and whether all ranks return the same bits."""
    result = JOBS[name](replace(ranks, dp_replicate=int(dp_replicate)), *arguments)
    digests = ranks.gather(hashlib.sha256(pickle.dumps(_as_numbers(result))).hexdigest())
    return {"result": result, "same": digests is not None and len(set(digests)) == 1}


def _as_numbers(result: Any) -> Any:
    """The values of nested dictionaries and tuples, with tensors as bytes."""
    if isinstance(result, dict):
        return {key: _as_numbers(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [_as_numbers(value) for value in result]
    return result.numpy().tobytes() if isinstance(result, torch.Tensor) else repr(result)


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "replicated": run_replicated,
    "once per update": run_once_per_update,
    **rank_engine.JOBS,
    **rank_loading.JOBS,
    **rank_saving.JOBS,
    **rank_workers.JOBS,
    **rank_adapter.JOBS,
    **rank_critic.JOBS,
    **rank_offload.JOBS,
    **rank_optimizer.JOBS,
    **rank_moe.JOBS,
    **rank_rewards.JOBS,
}


STORE_PREFIX = "cohort/0"  # of keys of `Ranks.store` where a launcher serves
LAST_JOB = "leave"


def do_jobs(out: Path) -> None:
    """Be the rank that the environment names, and write what comes of each job to `out`."""
    this = join_ranks(backend="gloo", timeout_s=PATIENCE_S, command_timeout_s=PATIENCE_S)
    for number in itertools.count():
        key = f"job {number}"
        this.store.wait([key], timedelta(days=1))
        if (job := this.store.get(key).decode()) == LAST_JOB:
            break
        name, *arguments = json.loads(job)
        result = JOBS[name](this, *arguments)
        if this.is_rank0:
            torch.save(result, out)
        del result
        gc.collect()
        this.store.add(f"done {number}", 1)
    leave_ranks()
