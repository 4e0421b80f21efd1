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


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: torchrun, or `cohort train` itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_of_launcher() -> int:
    """Return the rank that a launcher gave this process; 0 without one."""
    return int(os.environ["RANK"]) if started_by_torchrun() else 0


def join_ranks(*, backend: str, timeout_s: float, command_timeout_s: float) -> Ranks:
    """Connect to the other ranks, as given by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

    Args:
        backend: "gloo", or "cpu:gloo,cuda:nccl".
        timeout_s: deadline of every collective, and of this rendezvous.
        command_timeout_s: deadline of the wait for rank 0's next command.

    Raises:
        UserError: the address is unreachable, the port is in use, or processes have different world sizes.
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
    _agree_on_world_size(store, rank, world_size, timeout_s)
    deadline = timedelta(seconds=timeout_s)
    try:
        # Longer than ours: a rank that waits in a collective of the model should learn from gloo who is missing, and
        # not be ended by NCCL's watchdog as if it were the cause.
        model_timeout = timedelta(seconds=timeout_s + (60 if "nccl" in backend else 0))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=model_timeout)
        control_group = dist.new_group(backend="gloo", timeout=deadline)
        return Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            timeout_s=timeout_s,
            sibling_pids=_sibling_pids(world_size, control_group),
            control_group=control_group,
            # Rank 0 waits only until all ranks have received its command. It gives up together with the ranks that have
            # and are waiting for the rest, so all of them name the same rank.
            command_group=dist.new_group(
                backend="gloo", timeout=timedelta(seconds=command_timeout_s if rank else timeout_s)
            ),
            store=store,
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
            wait_for_workers=False,  # `_agree_on_world_size` waits, and reports who is missing
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


def _agree_on_world_size(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Check that all ranks are present with the same world size, before anything waits for missing ones forever.

    Raises:
        UserError: on every rank that can be reached, naming the machines and their world sizes.
    """
    store.append("joined", f"{rank} {world_size} {socket.gethostname()}\n")
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        verdict = _check_joined(store, world_size, timeout_s, deadline)
        store.set("verdict", verdict or f"ok {world_size}")
        if verdict:
            time.sleep(2)  # this process may hold the store from which the others read the verdict
            raise UserError(verdict)
        return
    try:
        while not store.check(["verdict"]):
            if time.monotonic() > deadline + 5:
                raise UserError(f"rank {rank} of {world_size} got no answer from rank 0 within {timeout_s:g} s")
            time.sleep(0.02)
        verdict = store.get("verdict").decode()
    except (RuntimeError, dist.DistError) as error:
        raise UserError(
            f"rank {rank} of {world_size}: rank 0 exited before all ranks had joined. {first_line(error)}"
        ) from error
    if verdict.startswith("ok ") and verdict != f"ok {world_size}":
        verdict = _disagreement(
            [f"rank 0 has WORLD_SIZE={verdict.removeprefix('ok ')}", f"rank {rank} has WORLD_SIZE={world_size}"]
        )
    if verdict != f"ok {world_size}":
        raise UserError(verdict)


def _check_joined(store: Any, world_size: int, timeout_s: float, deadline: float) -> str:
    """Wait on rank 0 until all ranks have joined; return an error message, or "" if all is well."""
    while True:
        joined = [line.split() for line in store.get("joined").decode().splitlines()]
        others = [f"rank {r} on {host} has WORLD_SIZE={n}" for r, n, host in joined if n != str(world_size)]
        if others:
            own = next(f"rank 0 on {host} has WORLD_SIZE={n}" for r, n, host in joined if r == "0")
            return _disagreement([own, *others])
        present = [int(r) for r, _, _ in joined]
        twice = sorted({r for r in present if present.count(r) > 1})
        if twice:
            hosts = " and ".join(host for r, _, host in joined if int(r) == twice[0])
            return f"two processes have RANK={twice[0]}, on {hosts}; give every machine a different --node-rank"
        missing = sorted(set(range(world_size)) - set(present))
        if not missing:
            return ""
        if time.monotonic() > deadline:
            return f"ranks {missing} of {world_size} did not join within {timeout_s:g} s"
        time.sleep(0.02)


def _disagreement(said: Sequence[str]) -> str:
    return f"ranks have different world sizes: {', '.join(said)}; use the same --nnodes on every machine"
