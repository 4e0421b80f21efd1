"""Connect the ranks of a run, as started by torchrun or `cohort train`, and check that all are there."""

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cohort.errors import UserError
from cohort.ranks.collectives import PeerError, Ranks, first_line
from cohort.ranks.stopping import NEVER_STOPPED, StopSignals


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: torchrun, or `cohort train` itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_of_launcher() -> int:
    """Return the rank that a launcher gave this process; 0 without one."""
    return int(os.environ["RANK"]) if started_by_torchrun() else 0


def join_ranks(*, backend: str, timeout_s: float, command_timeout_s: float, stop: StopSignals = NEVER_STOPPED) -> Ranks:
    """Connect to the other ranks, as given by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

    Args:
        backend: "gloo", or "cpu:gloo,cuda:nccl".
        timeout_s: deadline of every collective, and of each part of this rendezvous.
        command_timeout_s: deadline of the waits for rank 0's next command and for ranks that score rewards.
        stop: shared by the ranks from now on: a signal to one of them stops all.

    Raises:
        UserError: the address is unreachable, the port is in use, ranks are missing, or their world sizes differ.
        PeerError: the ranks cannot connect to each other.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    except (KeyError, ValueError) as error:
        raise UserError(
            f"RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or invalid ({error}); start the run with torchrun"
        ) from None
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is out of range for WORLD_SIZE={world_size}; use 0 to {world_size - 1}")
    store = _connect_store(address, rank, world_size, timeout_s)
    _wait_for_all(store, rank, world_size, timeout_s)
    deadline = timedelta(seconds=timeout_s)
    try:
        # Longer than ours: a rank that waits in a collective of the model should learn from gloo who is missing, and
        # not be ended by NCCL's watchdog as if it were the cause.
        model_timeout = timedelta(seconds=timeout_s + (60 if "nccl" in backend else 0))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=model_timeout)
        control_group = dist.new_group(backend="gloo", timeout=deadline)
        sibling_pids = _sibling_pids(world_size, control_group)
        stop.share(store, sibling_pids)
        return Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            timeout_s=timeout_s,
            command_timeout_s=command_timeout_s,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            sibling_pids=sibling_pids,
            control_group=control_group,
            # Rank 0 waits only until all ranks have received its command. It gives up together with the ranks that have
            # and are waiting for the rest, so all of them name the same rank.
            command_group=dist.new_group(
                backend="gloo", timeout=timedelta(seconds=command_timeout_s if rank else timeout_s)
            ),
            store=store,
            stop=stop,
        )
    except (RuntimeError, dist.DistError) as error:
        raise PeerError(
            f"rank {rank} of {world_size} reached the rendezvous at {address}, but could not connect to the other "
            f"ranks within {timeout_s:g} s. Either a rank has exited, or the machines cannot reach each other (set "
            f"GLOO_SOCKET_IFNAME to the network interface to use). {first_line(error)}"
        ) from error


def _sibling_pids(world_size: int, group: Any) -> tuple[int, ...]:
    """Return the process ids of the other ranks that the same launcher process has started."""
    # containers may share a host name, but each has its own process ids
    numbers = os.readlink("/proc/self/ns/pid") if os.path.islink("/proc/self/ns/pid") else ""
    own = (socket.gethostname(), numbers, os.getppid(), os.getpid())
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, own, group=group)
    return tuple(other[-1] for other in everyone if other[:-1] == own[:-1] and other != own)


def init_single_process_group(device: Any) -> None:
    """Initialize a process group of this process alone, for features of torch that need one. Opens no connections."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave_ranks() -> None:
    """Close the connections to the other ranks."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _connect_store(address: str, rank: int, world_size: int, timeout_s: float) -> Any:
    host, port = address.rsplit(":", 1)
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
            wait_for_workers=False,  # `_wait_for_all` waits, and reports who is missing
            multi_tenant=not launcher_serves,
        )
    except (OSError, OverflowError, RuntimeError, TypeError, ValueError, dist.DistError) as error:
        reason = str(error)
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            raise UserError(
                f"MASTER_PORT: {address} is in use by another program; use another port (torchrun --master-port), or "
                f"torchrun --standalone, which finds a free one"
            ) from error
        raise UserError(
            f"rank {rank} of {world_size} could not reach the rendezvous at {address} within {timeout_s:g} s; check "
            f"that rank 0 runs there, that the port is open, and that all machines start {world_size} processes in "
            f"total. {first_line(error)}"
        ) from error
    if not launcher_serves:
        return dist.PrefixStore("cohort", store)
    # The launcher's store and its contents survive a restart, so each attempt uses its own prefix.
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError(  # the launchers of several machines count restarts differently
            "restarts on several machines need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so that every attempt has its own "
            "store (`cohort launch slurm` sets it); set it for torchrun, or use --max-restarts 0"
        )
    return dist.PrefixStore(f"cohort/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Wait until the server listens: the store's own error message would fill a screen.

    Raises:
        OSError: it does not within `timeout_s`.
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


def _wait_for_all(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until all ranks are present with the same world size, before anything waits for missing ones forever.

    Raises:
        UserError: on every rank that can be reached, naming the ranks that are missing or differ.
    """
    deadline = time.monotonic() + timeout_s
    missing = list(range(world_size))
    try:
        store.append("joined", f"{rank} {world_size} {socket.gethostname()}\n")
        while True:
            joined = [line.split() for line in sorted(store.get("joined").decode().splitlines())]
            missing = sorted(set(range(world_size)) - {int(r) for r, _, _ in joined})
            problem = _find_mistake(joined)
            if not problem and missing and time.monotonic() > deadline:
                problem = f"ranks {missing} of {world_size} did not join within {timeout_s:g} s"
            if problem and rank == 0:
                time.sleep(2)  # this process may hold the store from which the others read the same
            if problem:
                raise UserError(problem)
            if not missing:
                return
            time.sleep(0.05)
    except (RuntimeError, dist.DistError) as error:
        raise UserError(
            f"rank {rank} of {world_size}: rank 0 exited before ranks {missing} had joined. {first_line(error)}"
        ) from error


def _find_mistake(joined: Sequence[Sequence[str]]) -> str:
    """Return what is wrong with the rank, world size and host of those that have joined; "" if nothing is."""
    if len({world_size for _, world_size, _ in joined}) > 1:
        said = [f"rank {rank} on {host} has WORLD_SIZE={world_size}" for rank, world_size, host in joined]
        return f"ranks have different world sizes: {', '.join(said)}; use the same --nnodes on every machine"
    by_rank: dict[str, list[str]] = {}
    for rank, _, host in joined:
        by_rank.setdefault(rank, []).append(host)
    for rank, hosts in by_rank.items():
        if len(hosts) > 1:
            return (
                f"two processes have RANK={rank}, on {' and '.join(hosts)}; give every machine a different --node-rank"
            )
    return ""
