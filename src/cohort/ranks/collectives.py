"""The ranks of a run and their collectives of host-side objects. `join.py` connects them.

Model tensors go through FSDP2's own collectives. Everything else is small (calls, completions, sequences, counts) and
goes over gloo, on GPUs too. Every wait has a deadline, and errors name the ranks that did not answer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cohort.errors import RankDesyncError, TrainingError
from cohort.ranks.stopping import NEVER_STOPPED, StopSignals

T = TypeVar("T")


class PeerError(RankDesyncError):
    """Another rank has died or does not answer; this one is not the cause."""


class Rank0Failed(Exception):  # noqa: N818
    """Rank 0 has ended the run and reports why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank and its collectives with the other ranks of the run. Rank 0 controls the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout_s: float = 0.0  # deadline of collectives
    command_timeout_s: float = 0.0  # deadline of waits in which a rank may be scoring rewards
    control_group: Any = None  # gloo process group of all collectives but `command`
    command_group: Any = None  # with a longer deadline, because rank 0 may be waiting for rewards
    store: Any = None  # key-value store of the rendezvous
    ranks_per_node: int | None = None  # as the launcher of this node says; None: all ranks
    dp_replicate: int = 1  # copies of the model; weights are sharded over the ranks of each
    sibling_pids: tuple[int, ...] = ()  # process ids of the other ranks started by the same launcher
    stop: StopSignals = NEVER_STOPPED  # whether this rank was asked to stop

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axes of the device mesh with their sizes, outermost first.

        Both `dp` axes are data parallel. FSDP2 shards over `dp_shard`, and `dp_replicate` has copies of all shards.
        """
        replicate = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        return {**replicate, "dp_shard": self.world_size // self.dp_replicate}

    @property
    def dp_size(self) -> int:
        """Number of different shares of a batch: the product of the mesh's `dp` axes."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_shard(self) -> int:
        """Number of ranks that the weights are sharded over."""
        return self.mesh_axes["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """This rank's coordinate on the mesh's `dp` axes."""
        return self._dp_rank_of(self.rank)

    @property
    def dp_leaders(self) -> tuple[int, ...]:
        """The first rank at each coordinate of the `dp` axes. All ranks at a coordinate have the same sequences."""
        return tuple(range(0, self.world_size, self.world_size // self.dp_size))

    def _dp_rank_of(self, rank: int) -> int:
        return rank * self.dp_size // self.world_size

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh of all ranks. Every rank calls this after `join_ranks`."""
        return init_device_mesh(device_type, tuple(self.mesh_axes.values()), mesh_dim_names=tuple(self.mesh_axes))

    def broadcast(self, value: T | None = None) -> T:
        """Return rank 0's value on every rank."""
        return self._broadcast(value, self.control_group)

    def command(self, value: T | None = None) -> T:
        """Broadcast with the longer deadline of `command_group`."""
        return self._broadcast(value, self.command_group)

    def end_commands(self) -> None:
        """Tell the other ranks that no more commands follow. Called on rank 0."""
        self.command(None)

    def scatter(self, values: Sequence[T] | None = None) -> T:
        """Return entry `dp_rank` of rank 0's `values`, which has `dp_size` entries; other ranks pass None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        per_rank = None if values is None else [values[self._dp_rank_of(rank)] for rank in range(self.world_size)]
        received: list[Any] = [None]
        with self._explain_failure("scatter"):
            dist.scatter_object_list(received, per_rank, group=self.control_group)
        return received[0]

    def run_on_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and return its result on every rank. The other ranks wait with the longer deadline.

        Raises:
            Rank0Failed: on the other ranks if `make` raised. Rank 0 raises the original exception.
        """
        if not self.is_rank0:
            answer: tuple[bool, Any] = self.command()
            if not answer[0]:
                raise Rank0Failed
            return answer[1]
        try:
            value = make()
        except BaseException:
            self.command((False, None))
            raise
        self.command((True, value))
        return value

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [value]
        received: list[Any] | None = [None] * self.world_size if self.is_rank0 else None
        with self._explain_failure("gather"):
            dist.gather_object(value, received, group=self.control_group)
        return received

    def wait_for_all(self) -> None:
        """Wait until every rank has called this, with the longer deadline on rank 0, too."""
        if self.world_size > 1:
            with self._explain_failure("a wait for all ranks", self.command_timeout_s):
                deadline = timedelta(seconds=self.command_timeout_s)
                dist.monitored_barrier(self.command_group, timeout=deadline)  # rank 0's group has the shorter one

    def all_reduce_max(self, value: float) -> float:
        """Return the maximum over all ranks, on every rank."""
        return self.all_reduce_maxima([value])[0]

    def all_reduce_maxima(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each entry over all ranks, on every rank."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_reduce_min(self, value: float) -> float:
        """Return the minimum over all ranks, on every rank."""
        return self._all_reduce([value], dist.ReduceOp.MIN)[0]

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each entry over the `dp` axes in float64, on every rank.

        All ranks pass the same number of entries. Ranks at the same coordinate of these have the same sequences, so
        only the first of them counts.
        """
        is_counted = self.rank in self.dp_leaders
        return self._all_reduce(values if is_counted else [0.0] * len(values), dist.ReduceOp.SUM)

    def _broadcast(self, value: Any, group: Any) -> Any:
        if self.world_size == 1:
            return value
        values = [value]
        with self._explain_failure("broadcast"):
            dist.broadcast_object_list(values, group=group)
        return values[0]

    def _all_reduce(self, values: Sequence[float], op: Any) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._explain_failure("all-reduce"):
            dist.all_reduce(tensor, op=op, group=self.control_group)
        return tensor.tolist()

    @contextmanager
    def _explain_failure(self, what: str, deadline_s: float | None = None) -> Iterator[None]:
        """Context that turns a failed collective into an error that names the missing ranks."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, TrainingError | torch.OutOfMemoryError):
                raise
            raise self.explain(error, what, deadline_s) from error

    def explain(self, error: Exception, what: str, deadline_s: float | None = None) -> PeerError:
        """Return an error that names the ranks that do not answer.

        Each rank that gives up records this in the store and looks for the others. Ranks that hang never do. Ranks that
        died are reported by the launcher.
        """
        silent = self._find_silent_ranks()
        who = f"ranks {silent} did not answer" if silent else "a connection broke"
        limit_s = self.timeout_s if deadline_s is None else deadline_s
        return PeerError(f"rank {self.rank} gave up in {what} (deadline {limit_s:g} s): {who}. {first_line(error)}")

    def _find_silent_ranks(self) -> list[int]:
        """Wait a few seconds, and return the ranks that have not given up as well."""
        present = {self.rank}
        try:
            self.store.set(f"cohort/gave_up/{self.rank}", "1")
            deadline = time.monotonic() + min(10.0, 2.0 + self.timeout_s / 10)
            while len(present) < self.world_size and time.monotonic() < deadline:
                absent = [r for r in range(self.world_size) if r not in present]
                present |= {r for r in absent if self.store.check([f"cohort/gave_up/{r}"])}
                time.sleep(0.1)
        except (RuntimeError, dist.DistError):
            pass  # the process that held the store has exited
        return [r for r in range(self.world_size) if r not in present]


SINGLE_PROCESS = Ranks()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
