"""Several ranks for a test: real processes, real torch.distributed with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).parent / "rank_script.py"


def run_ranks(world_size: int, folder: Path, *jobs: tuple[str, ...], timeout_s: float = 240) -> list[dict[str, Any]]:
    """The results of jobs (a name in `rank_script.JOBS` and its arguments) that `world_size` ranks do together.

    One start of the processes serves all jobs: starting them takes longer than most jobs.
    """
    out = folder / f"ranks-{world_size}.pt"
    arguments = [json.dumps(job) for job in jobs]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(out), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(out, weights_only=False)
    return [results[argument] for argument in arguments]
