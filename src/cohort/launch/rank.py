"""Entry point of a rank: rank 0 runs the training loop, the others serve its calls."""

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from cohort.config import Config
from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.models import resolve_device
from cohort.processes.this_process import resume_gc
from cohort.ranks.collectives import PeerError, Rank0Failed, Ranks
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.ranks.stopping import RunStopped, StopSignals, die_with_launcher
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout.engines.auto import choose_engine
from cohort.run.files import resume_hint
from cohort.run.result import EXIT_STATUS_FILE, ExitStatus
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.checkpointer import ChecksumTask
from cohort.trainer.run import train
from cohort.trainer.setup import rank_device

# In messages of gloo and NCCL about a process that exited or does not answer.
_LOST_PEER_MESSAGES = ("gloo", "Connection closed by peer", "Connection reset", "Timed out", "timed out", "NCCL")


def run_rank(config: Config, *, resume: bool, display: Display | None = None) -> None:
    """Run one rank, identified by the launcher's environment variables.

    If `cohort train` started this process, rank 0 reports the outcome through a file and does not raise.
    `display` shows progress on rank 0.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
        TrainingError: the run failed.
    """
    die_with_launcher()
    config = choose_engine(config, print if os.environ.get("RANK") == "0" else lambda _: None)
    hint = partial(resume_hint, Path(config.run.dir))
    with StopSignals("rank", grace_s=config.hardware.grace_s, resume_hint=hint) as stop:
        _run_and_report(config, stop, resume=resume, display=display)


def _run_and_report(config: Config, stop: StopSignals, *, resume: bool, display: Display | None) -> None:
    status_file = os.environ.get(EXIT_STATUS_FILE)
    is_first = os.environ.get("RANK") == "0"
    try:
        _run(config, stop, resume=resume, display=display)
        status = ExitStatus(kind="finished")
    except PeerError:
        raise
    except UserError as error:
        status = ExitStatus(kind="user error", message=str(error))
        if not is_first:
            time.sleep(2)  # let rank 0 report the same error first
            raise
        if status_file is None:
            raise
    except RunStopped as stopped:
        status = ExitStatus(kind="stopped", code=int(stopped.code or 0))
        if status_file is None:
            raise
    except TrainingError as error:
        status = ExitStatus(kind="training error", message=str(error))
        if status_file is None or not is_first:
            raise
    if status_file is not None and is_first:
        status.write(Path(status_file))


def _run(config: Config, stop: StopSignals, *, resume: bool, display: Display | None) -> None:
    _check_processes(config)
    rewards_s = (1 + config.rollout.resample) * sum(reward.timeout_s for reward in config.rewards)
    on_gpu = resolve_device(config.hardware.device).type == "cuda"
    ranks = join_ranks(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout_s=config.hardware.timeout_s,
        command_timeout_s=config.hardware.timeout_s + rewards_s,
        stop=stop,
    )
    try:
        if ranks.is_rank0:
            train(config, resume=resume, display=display, ranks=ranks)
        else:
            work(config, ranks)
    except RunStopped:
        leave_ranks()
        raise
    except (RuntimeError, dist.DistError) as error:
        lost_peer = not isinstance(error, TrainingError | torch.OutOfMemoryError)
        if lost_peer and any(text in str(error) for text in _LOST_PEER_MESSAGES):
            raise ranks.explain(error, "a collective of the model") from error
        raise
    leave_ranks()


def work(config: Config, ranks: Ranks) -> None:
    """On ranks other than 0: build the worker, then serve rank 0's calls until the run ends."""
    resume_gc()
    device = rank_device(config, ranks)
    try:
        command: ChecksumTask | WorkerSpec | None
        while isinstance(command := ranks.command(), ChecksumTask):
            command.run(ranks)
        if command is not None:
            WorkerGroup(build_worker(config, ranks, command, device=device, tokenizer=None), ranks).serve()
    except Rank0Failed:
        pass


def _check_processes(config: Config) -> None:
    """Check `hardware.processes` against the number of processes that the launcher started.

    Raises:
        UserError: the numbers differ.
    """
    wanted, started = config.hardware.processes, os.environ.get("LOCAL_WORLD_SIZE")
    by_cohort = EXIT_STATUS_FILE in os.environ  # started by `cohort train`, which may have dropped a failed GPU
    if by_cohort or started is None or wanted in ("auto", int(started)):
        return
    alone = config.single_process_key
    raise UserError(
        f"hardware.processes: {wanted}"
        + ("" if alone is None else f" ({alone} works in one process only)")
        + f", but the launcher started {started} processes on this machine; use --nproc-per-node {wanted}"
        + (", or hardware.processes: auto" if alone is None else "")
    )
