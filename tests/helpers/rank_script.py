"""What the tests of several ranks run in each of them: jobs by name, and rank 0 writes what came of them."""

import gc
import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from cohort.ranks.join import join_ranks, leave_ranks
from waiting import PATIENCE_S

JOBS: dict[str, Callable[..., dict[str, Any]]] = {
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
