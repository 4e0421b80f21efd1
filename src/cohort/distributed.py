"""The processes of a run: how they find each other, and how they hand each other host-side objects.

Tensors of the model travel through FSDP2's own collectives. What is here is small: commands, completions, sequences,
counts. It goes over gloo, on GPUs too. Every wait has a deadline, and whoever does not answer is named.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cohort.errors import OutOfStepError, TrainingError, UserError

T = TypeVar("T")


class PeerError(OutOfStepError):
    """Another rank is gone or does not answer: this one is not the cause."""


class Stopped(Exception):  # noqa: N818
    """Rank 0 has ended the run, and tells why itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those of the run. Rank 0 decides; the others do as it says."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout_s: float = 0.0  # how long a rank waits for the others
    # the other ranks' waits for the next command are longer: rank 0 may be waiting for rewards
    command_group: Any = None
    control_group: Any = None
    store: Any = None
    neighbours: tuple[int, ...] = ()  # process ids of the ranks that have the same launcher

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axes of the device mesh with their sizes, outermost first. `dp` is data parallel: FSDP2 shards over it."""
        return {"dp": self.world_size}

    @property
    def dp_size(self) -> int:
        """Number of ranks or groups of ranks that compute different sequences."""
        return self.mesh_axes["dp"]

    @property
    def dp_rank(self) -> int:
        """This rank's position on the axis `dp`."""
        return self._dp_rank_of(self.rank)

    @property
    def dp_leaders(self) -> tuple[int, ...]:
        """The first rank at each position of the axis `dp`. All ranks at one position have the same sequences."""
        return tuple(range(0, self.world_size, self.world_size // self.dp_size))

    def _dp_rank_of(self, rank: int) -> int:
        return rank * self.dp_size // self.world_size

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Make the mesh of all ranks. Every rank calls this, after the process group is there (`join_ranks`)."""
        return init_device_mesh(device_type, tuple(self.mesh_axes.values()), mesh_dim_names=tuple(self.mesh_axes))

    def broadcast(self, value: T | None = None) -> T:
        """Rank 0's value, on every rank."""
        return self._broadcast(value, self.control_group)

    def command(self, value: T | None = None) -> T:
        """As `broadcast`, with the longer deadline."""
        return self._broadcast(value, self.command_group)

    def end_commands(self) -> None:
        """On rank 0: send None, after which the other ranks wait for no more commands."""
        self.command(None)

    def scatter(self, values: Sequence[T] | None = None) -> T:
        """The entry `dp_rank` of rank 0's `values`, of which there are `dp_size`; other ranks give None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        per_rank = None if values is None else [values[self._dp_rank_of(rank)] for rank in range(self.world_size)]
        received: list[Any] = [None]
        with self._named("scatter"):
            dist.scatter_object_list(received, per_rank, group=self.control_group)
        return received[0]

    def first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank. The others wait with the longer deadline.

        Raises:
            Stopped: on the other ranks, where `make` raised on rank 0 (and there: what it raised).
        """
        if not self.is_first:
            answer: tuple[bool, Any] = self.command()
            if not answer[0]:
                raise Stopped
            return answer[1]
        try:
            value = make()
        except BaseException:
            self.command((False, None))
            raise
        self.command((True, value))
        return value

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [value]
        received: list[Any] | None = [None] * self.world_size if self.is_first else None
        with self._named("gather"):
            dist.gather_object(value, received, group=self.control_group)
        return received

    def largest(self, value: float) -> float:
        """The largest of all ranks' values, on every rank."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def smallest(self, value: float) -> float:
        """The smallest of all ranks' values, on every rank."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each entry's sum over the axis `dp` in float64, on every rank. All ranks give equally many.

        Ranks at one position of `dp` have the same sequences, so that only the first of them counts.
        """
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.rank not in self.dp_leaders:
            tensor.zero_()
        with self._named("sum"):
            dist.all_reduce(tensor, group=self.control_group)
        return tensor.tolist()

    def _broadcast(self, value: Any, group: Any) -> Any:
        if self.world_size == 1:
            return value
        values = [value]
        with self._named("broadcast"):
            dist.broadcast_object_list(values, group=group)
        return values[0]

    def _reduce(self, value: float, op: Any) -> float:
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        with self._named("agreement"):
            dist.all_reduce(tensor, op=op, group=self.control_group)
        return tensor.item()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say who is missing when a collective fails."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, TrainingError | torch.OutOfMemoryError):
                raise
            raise self.explain(error, what) from error

    def explain(self, error: Exception, what: str) -> PeerError:
        """An error that names the ranks that no longer answer.

        Every rank that gives up says so and looks for the others. Ranks that hang never do; those that have died have
        been seen by the launcher.
        """
        silent = self._roll_call()
        who = f"ranks {silent} did not answer" if silent else "a connection broke"
        return PeerError(
            f"rank {self.rank} gave up in {what} (deadline {self.timeout_s:g} s): {who}. {_first_line(error)}"
        )

    def _roll_call(self) -> list[int]:
        """The ranks that do not report within a few seconds that they have given up too."""
        present = {self.rank}
        try:
            self.store.set(f"cohort/gave_up/{self.rank}", "1")
            deadline = time.monotonic() + min(10.0, 2.0 + self.timeout_s / 10)
            while len(present) < self.world_size and time.monotonic() < deadline:
                absent = [r for r in range(self.world_size) if r not in present]
                present |= {r for r in absent if self.store.check([f"cohort/gave_up/{r}"])}
                time.sleep(0.1)
        except (RuntimeError, dist.DistError):
            pass  # the store went with the process that held it
        return [r for r in range(self.world_size) if r not in present]


ALONE = Ranks()


def started_by_torchrun() -> bool:
    """Whether this process is one of several that a launcher has started (torchrun, or `cohort train` itself)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_ranks(*, backend: str, timeout_s: float, command_timeout_s: float) -> Ranks:
    """Meet the other processes, at the place that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        backend: "gloo", or "cpu:gloo,cuda:nccl".
        timeout_s: deadline of every wait for another rank, this meeting included.
        command_timeout_s: deadline of the waits for rank 0's next command.

    Raises:
        UserError: the place cannot be reached, its port is in use, or the processes do not agree on how many they are.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the environment of a distributed run is incomplete ({error}); start it with torchrun"
        ) from None
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE - 1")
    store = _meet(place, rank, world_size, timeout_s)
    _agree_on_world_size(store, rank, world_size, timeout_s)
    deadline = timedelta(seconds=timeout_s)
    try:
        # Later than ours: whoever waits in a collective of the model should hear from gloo who is missing, and not be
        # ended by NCCL's watchdog as if it were the cause.
        later = timedelta(seconds=timeout_s + (60 if "nccl" in backend else 0))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=later)
        control_group = dist.new_group(backend="gloo", timeout=deadline)
        return Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            timeout_s=timeout_s,
            neighbours=_neighbours(world_size, control_group),
            control_group=control_group,
            # Rank 0 waits only for ranks to take its command. It gives up when those do that have taken it and wait for
            # it in what follows, and all of them name the same one.
            command_group=dist.new_group(
                backend="gloo", timeout=timedelta(seconds=command_timeout_s if rank else timeout_s)
            ),
            store=store,
        )
    except (RuntimeError, dist.DistError) as error:
        raise PeerError(
            f"rank {rank} of {world_size} met the others at {place} and could not connect to them within {timeout_s:g} "
            f"s: either one of them has ended, or the machines cannot reach each other (GLOO_SOCKET_IFNAME names the "
            f"network interface to use). {_first_line(error)}"
        ) from error


def _neighbours(world_size: int, group: Any) -> tuple[int, ...]:
    """The process ids of the other ranks of this machine that the same process has started."""
    # containers may have the same name, and each its own numbers of processes
    numbers = os.readlink("/proc/self/ns/pid") if os.path.islink("/proc/self/ns/pid") else ""
    own = (socket.gethostname(), numbers, os.getppid(), os.getpid())
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, own, group=group)
    return tuple(other[-1] for other in everyone if other[:-1] == own[:-1] and other != own)


def join_oneself(device: Any) -> None:
    """Make this process a world of its own, for what torch does among ranks only. Nothing is connected to."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave_ranks() -> None:
    """Close the connections to the other ranks."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: str, rank: int, world_size: int, timeout_s: float) -> Any:
    host, port = place.rsplit(":", 1)
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rank == 0 and not launcher_serves
    try:
        if not is_server:
            _wait_for_server(host, int(port), timeout_s)
        store: Any = dist.TCPStore(
            host,
            int(port),
            world_size,
            is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # `_agree_on_world_size` does, and says who is missing
            multi_tenant=not launcher_serves,
        )
    except (OSError, OverflowError, RuntimeError, TypeError, ValueError, dist.DistError) as error:
        reason = str(error)
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            raise UserError(
                f"MASTER_PORT: {place} is in use by another program; give another port (torchrun --master-port), or "
                f"use torchrun --standalone, which finds a free one"
            ) from error
        raise UserError(
            f"rank {rank} of {world_size} could not meet the others at {place} within {timeout_s:g} s: is rank 0 "
            f"running there, is the port open, and do all machines say {world_size} processes? {_first_line(error)}"
        ) from error
    if not launcher_serves:
        return dist.PrefixStore("cohort", store)
    # The launcher's own store outlives a restart, with what was written to it.
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError(  # the launchers of several machines count restarts differently
            "restarts on several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, so that every "
            "start meets at a place of its own (`cohort launch slurm` does), or use --max-restarts 0"
        )
    return dist.PrefixStore(f"cohort/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens there: if nobody comes, the store's own complaint fills a screen.

    Raises:
        OSError: nobody does.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _agree_on_world_size(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Compare what every process was told, before anything that would wait for the missing ones for ever.

    Raises:
        UserError: on every rank that can be reached, with the machines and what they say.
    """
    store.append("joined", f"{rank} {world_size} {socket.gethostname()}\n")
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        verdict = _verdict(store, world_size, timeout_s, deadline)
        store.set("verdict", verdict or f"ok {world_size}")
        if verdict:
            time.sleep(2)  # this process may hold the store in which the others are about to read it
            raise UserError(verdict)
        return
    try:
        while not store.check(["verdict"]):
            if time.monotonic() > deadline + 5:
                raise UserError(f"rank {rank} of {world_size} heard nothing from rank 0 within {timeout_s:g} s")
            time.sleep(0.02)
        verdict = store.get("verdict").decode()
    except (RuntimeError, dist.DistError) as error:
        raise UserError(
            f"rank {rank} of {world_size}: rank 0 ended before all had met. {_first_line(error)}"
        ) from error
    if verdict.startswith("ok ") and verdict != f"ok {world_size}":
        verdict = _disagreement(
            [f"rank 0 says {verdict.removeprefix('ok ')} processes", f"rank {rank} says {world_size}"]
        )
    if verdict != f"ok {world_size}":
        raise UserError(verdict)


def _verdict(store: Any, world_size: int, timeout_s: float, deadline: float) -> str:
    """On rank 0: wait for the others. What is wrong with who came and who did not; nothing if all is well."""
    while True:
        joined = [line.split() for line in store.get("joined").decode().splitlines()]
        others = [f"rank {r} on {host} says {n} processes" for r, n, host in joined if n != str(world_size)]
        if others:
            own = next(f"rank 0 on {host} says {n} processes" for r, n, host in joined if r == "0")
            return _disagreement([own, *others])
        present = [int(r) for r, _, _ in joined]
        twice = sorted({r for r in present if present.count(r) > 1})
        if twice:
            hosts = " and ".join(host for r, _, host in joined if int(r) == twice[0])
            return f"rank {twice[0]} is there twice, on {hosts}; give every machine a --node-rank of its own"
        missing = sorted(set(range(world_size)) - set(present))
        if not missing:
            return ""
        if time.monotonic() > deadline:
            return f"ranks {missing} of {world_size} did not join within {timeout_s:g} s"
        time.sleep(0.02)


def _disagreement(said: Sequence[str]) -> str:
    listed = ", ".join(said)
    return f"the processes do not agree on their number: {listed}; give every machine the same --nnodes"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
