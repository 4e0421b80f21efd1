"""Several ranks for a test: real processes, real torch.distributed with gloo."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forked import fork
from rank_script import do_jobs
from waiting import until


def run_ranks(world_size: int, folder: Path, *jobs: tuple[str, ...], timeout_s: float = 240) -> list[dict[str, Any]]:
    """The results of jobs (a name in `rank_script.JOBS` and its arguments) that `world_size` ranks do together.

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
        until(
            lambda: any(p.exitcode for p in processes) or all(p.exitcode == 0 for p in processes), timeout_s=timeout_s
        )
        assert not any(p.exitcode for p in processes), said.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    results = torch.load(out, weights_only=False)
    return [results[argument] for argument in arguments]
