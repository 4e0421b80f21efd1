"""Several ranks for a test: real processes, real torch.distributed with gloo."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forked import fork
from rank_script import do_jobs
from waiting import until


class RanksOnDemand:
    """Jobs of several ranks, each of which is done once, when a test first asks for what came of it.

    Ranks are forked for each job: that takes a fraction of a second, and a job that fails spoils no other.
    """

    def __init__(self, folder: Path):
        """`folder` is for what the ranks write."""
        self._folder = folder
        self._results: dict[tuple[int, tuple[str, ...]], Any] = {}

    def __call__(self, world_size: int, *job: str) -> Any:
        """What `world_size` ranks made of a job: a name in `rank_script.JOBS` and its arguments."""
        key = (world_size, job)
        if key not in self._results:
            (self._results[key],) = run_ranks(world_size, self._folder, job)
        return self._results[key]


def run_ranks(world_size: int, folder: Path, *jobs: tuple[str, ...]) -> list[Any]:
    """The results of jobs that `world_size` ranks do together, one after the other.

    They meet at a store of this process, as torchrun's do at the launcher's.
    """
    out = folder / f"ranks-{world_size}.pt"
    said = folder / f"ranks-{world_size}.log"
    arguments = [json.dumps(job) for job in jobs]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    numbers = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    processes = [
        fork(do_jobs, arguments, out, out=said, RANK=rank, LOCAL_RANK=rank, **place, **numbers)
        for rank in range(world_size)
    ]
    try:
        until(lambda: any(p.exitcode for p in processes) or all(p.exitcode == 0 for p in processes))
        assert not any(p.exitcode for p in processes), said.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    results = torch.load(out, weights_only=False)
    return [results[argument] for argument in arguments]
