"""One process of a run of several: rank 0 runs the loop, the others work for it."""

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from cohort import stopping
from cohort.auto_engine import choose_engine
from cohort.config import Config
from cohort.distributed import PeerError, Ranks, Stopped, join_ranks, leave_ranks
from cohort.errors import TrainingError, UserError
from cohort.models import resolve_device
from cohort.run_files import resume_hint
from cohort.run_result import EXIT_STATUS_FILE, ExitStatus
from cohort.startup import resume_gc
from cohort.trainer.build import BuildOrder, build_worker
from cohort.trainer.resume import VerifyOrder
from cohort.trainer.run import train
from cohort.trainer.setup import rank_device
from cohort.trainer.worker_group import WorkerGroup

# What the libraries that carry the collectives say when another process is gone or silent.
_SIGNS_OF_A_LOST_PEER = ("gloo", "Connection closed by peer", "Connection reset", "Timed out", "timed out", "NCCL")


def run_rank(config: Config, *, resume: bool) -> None:
    """Be one rank of a run, as a launcher's environment says which.

    Where `cohort train` started this process, an orderly end is told through a file and is no failure of the process.

    Raises:
        UserError: something that the user can mend.
        TrainingError: the run cannot go on.
    """
    stopping.die_with_launcher()
    config = choose_engine(config, print if os.environ.get("RANK") == "0" else lambda _: None)
    words = partial(resume_hint, Path(config.run.dir))
    with stopping.handle_signals("rank", grace_s=config.hardware.grace_s, resume_hint=words):
        _run_and_tell(config, resume=resume)


def _run_and_tell(config: Config, *, resume: bool) -> None:
    told = os.environ.get(EXIT_STATUS_FILE)
    is_first = os.environ.get("RANK") == "0"
    try:
        _run(config, resume=resume)
        outcome = ExitStatus(kind="finished")
    except PeerError:
        raise
    except UserError as error:
        outcome = ExitStatus(kind="user error", message=str(error))
        if not is_first:
            time.sleep(2)  # rank 0 has most likely found the same, and tells it
            raise
        if told is None:
            raise
    except stopping.RunStopped as stop:
        outcome = ExitStatus(kind="stopped", code=int(stop.code or 0))
        if told is None:
            raise
    except TrainingError as error:
        outcome = ExitStatus(kind="training error", message=str(error))
        if told is None or not is_first:
            raise
    if told is not None and is_first:
        outcome.write(Path(told))


def _run(config: Config, *, resume: bool) -> None:
    _check_processes(config)
    rewards_s = (1 + config.rollout.resample) * sum(reward.timeout_s for reward in config.rewards)
    on_gpu = resolve_device(config.hardware.device).type == "cuda"
    ranks = join_ranks(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout_s=config.hardware.timeout_s,
        command_timeout_s=config.hardware.timeout_s + rewards_s,
    )
    stopping.share(ranks.store, ranks.neighbours)
    try:
        if ranks.is_first:
            train(config, resume=resume, ranks=ranks)
        else:
            work(config, ranks)
    except stopping.RunStopped:
        leave_ranks()
        raise
    except (RuntimeError, dist.DistError) as error:
        lost_peer = not isinstance(error, TrainingError | torch.OutOfMemoryError)
        if lost_peer and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
            raise ranks.explain(error, "a collective of the model") from error
        raise
    leave_ranks()


def work(config: Config, ranks: Ranks) -> None:
    """On the ranks other than 0: build what every rank has, then do as rank 0 says until it ends the run."""
    resume_gc()
    device = rank_device(config, ranks)
    try:
        order: VerifyOrder | BuildOrder | None
        while isinstance(order := ranks.command(), VerifyOrder):
            order.carry_out(ranks)
        if order is not None:
            WorkerGroup(build_worker(config, ranks, order, device=device, tokenizer=None), ranks).serve()
    except Stopped:
        pass


def _check_processes(config: Config) -> None:
    """Compare the configuration with what the launcher has started.

    Raises:
        UserError: they say different numbers.
    """
    wanted, started = config.hardware.processes, os.environ.get("LOCAL_WORLD_SIZE")
    ours = EXIT_STATUS_FILE in os.environ  # it knows the configuration, and may have left a rank out
    if ours or started is None or wanted in ("auto", int(started)):
        return
    alone = config.single_process_key
    raise UserError(
        f"hardware.processes: {wanted}"
        + ("" if alone is None else f" ({alone} works in one process only)")
        + f", and the launcher has started {started} processes on this machine; use --nproc-per-node {wanted}"
        + (", or hardware.processes: auto" if alone is None else "")
    )
