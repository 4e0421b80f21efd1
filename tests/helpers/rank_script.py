"""What the tests of several ranks run in each of them: jobs by name, and rank 0 writes what came of them."""

import json
from collections.abc import Callable
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
}


def do_jobs(jobs: list[str], out: Path) -> None:
    """Be the rank that the environment names."""
    this = join_ranks(backend="gloo", timeout_s=PATIENCE_S, command_timeout_s=PATIENCE_S)
    done = {}
    for job in jobs:
        name, *arguments = json.loads(job)
        done[job] = JOBS[name](this, *arguments)
    if this.is_rank0:
        torch.save(done, out)
    leave_ranks()
