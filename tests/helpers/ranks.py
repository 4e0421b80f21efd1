"""Several ranks for a test: real processes, real torch.distributed with gloo."""

import json
import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from forked import fork
from rank_script import LAST_JOB, STORE_PREFIX, do_jobs
from waiting import until

MOST_STANDING = 2  # groups of ranks that wait for more jobs: each rank takes some hundreds of megabytes


class RanksOnDemand:
    """Jobs of several ranks, each of which is done once, when a test first asks for what came of it.

    The same ranks do one after the other, also for other files of tests, as their first takes each of them a second or
    two. A job that fails spoils no other: the next has new ranks.
    """

    _standing: ClassVar[dict[int, "StandingRanks"]] = {}  # by their number, those asked last at the end

    def __init__(self, folder: Path):
        """`folder` is for what the ranks write."""
        self._folder = folder
        self._results: dict[tuple[int, tuple[str, ...]], Any] = {}

    def __call__(self, world_size: int, *job: str) -> Any:
        """What `world_size` ranks made of a job: a name in `rank_script.JOBS` and its arguments."""
        key = (world_size, job)
        if key not in self._results:
            ranks = self._standing.pop(world_size, None) or StandingRanks(world_size, self._folder)
            self._results[key] = ranks.do(job)
            self._standing[world_size] = ranks
            if len(self._standing) > MOST_STANDING:
                del self._standing[next(iter(self._standing))]
        return self._results[key]


def run_ranks(world_size: int, folder: Path, *jobs: tuple[str, ...]) -> list[Any]:
    """The results of jobs that `world_size` ranks do together, one after the other."""
    ranks = StandingRanks(world_size, folder)
    results = [ranks.do(job) for job in jobs]
    ranks.leave()
    return results


class StandingRanks:
    """Ranks that do jobs until they leave, or this object ends.

    They meet at a store of this process, as torchrun's do at the launcher's, and find their jobs there.
    """

    def __init__(self, world_size: int, folder: Path):
        self._out, self._said = folder / f"ranks-{world_size}.pt", folder / f"ranks-{world_size}.log"
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = dist.PrefixStore(STORE_PREFIX, self._server)
        self._num_jobs = 0
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._server.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        numbers = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
        self._processes = [
            fork(do_jobs, self._out, out=self._said, RANK=rank, LOCAL_RANK=rank, **place, **numbers)
            for rank in range(world_size)
        ]
        weakref.finalize(self, lambda processes: [process.kill() for process in processes], self._processes)

    def do(self, job: tuple[str, ...]) -> Any:
        """What the ranks make of a job, once all of them have done it."""
        done = f"done {self._num_jobs}"
        self._tell(json.dumps(job))
        until(lambda: self._ended() or self._store.add(done, 0) == len(self._processes))
        assert not self._ended(), self._said.read_text()[-4000:]
        return torch.load(self._out, weights_only=False)

    def leave(self) -> None:
        """Have them leave each other, and wait for their ends."""
        self._tell(LAST_JOB)
        until(lambda: all(process.exitcode is not None for process in self._processes))
        assert not any(process.exitcode for process in self._processes), self._said.read_text()[-4000:]

    def _tell(self, job: str) -> None:
        self._store.set(f"job {self._num_jobs}", job)
        self._num_jobs += 1

    def _ended(self) -> bool:
        return any(process.exitcode is not None for process in self._processes)
