"""What the tests of several ranks run in each of them: jobs by name, and rank 0 writes what came of them."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import rank_adapter
import rank_crew
import rank_critic
import rank_engine
import rank_loading
import rank_offload
from cohort.distributed import join_ranks, leave_ranks

JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    **rank_engine.JOBS,
    **rank_loading.JOBS,
    **rank_crew.JOBS,
    **rank_adapter.JOBS,
    **rank_critic.JOBS,
    **rank_offload.JOBS,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    out, *jobs = sys.argv[1:]
    this = join_ranks(backend="gloo", timeout_s=60, command_timeout_s=60)
    done = {}
    for job in jobs:
        name, *arguments = json.loads(job)
        done[job] = JOBS[name](this, *arguments)
    if this.is_first:
        torch.save(done, out)
    leave_ranks()
