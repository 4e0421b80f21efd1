"""Entry points of a rank: rank 0 runs the training loop, the others serve its calls."""

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from cohort.config import Config
from cohort.display import Display
from cohort.errors import RankDesyncError, TrainingError, UserError
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
from cohort.trainer.run import OtherRanks, train
from cohort.trainer.setup import rank_device
from cohort.trainer.worker import Worker

T = TypeVar("T")

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
    ranks = _join(config, stop)
    try:
        with _explaining_lost_peers(ranks):
            if ranks.is_rank0:
                train(config, resume=resume, display=display, ranks=ranks)
            else:
                work(config, ranks)
    except RunStopped:
        leave_ranks()
        raise
    leave_ranks()


def _join(config: Config, stop: StopSignals) -> Ranks:
    _check_processes(config)
    rewards_s = (1 + config.rollout.resample) * sum(reward.timeout_s for reward in config.rewards)
    on_gpu = resolve_device(config.hardware.device).type == "cuda"
    return join_ranks(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout_s=config.hardware.timeout_s,
        command_timeout_s=config.hardware.timeout_s + rewards_s,
        stop=stop,
    )


@contextmanager
def _explaining_lost_peers(ranks: Ranks) -> Iterator[None]:
    """Name the ranks that do not answer if a collective of the model fails within the context."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        lost_peer = not isinstance(error, TrainingError | torch.OutOfMemoryError)
        if lost_peer and any(text in str(error) for text in _LOST_PEER_MESSAGES):
            raise ranks.explain(error, "a collective of the model") from error
        raise


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opens:
    """Rank 0 opens a run: the other ranks drop the workers of an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """Rank 0 has done what every rank called."""

    what: str
    value: Any = None  # what the call returns on the other ranks
    failed: bool = False
    stopped: int | None = None  # signal that stopped it


@dataclass(frozen=True, slots=True, kw_only=True)
class _AsksFlags:
    """Rank 0 asks which of some flags are set on any rank."""

    count: int


class ScriptRank:
    """This rank of a script that runs on every rank: what they all call, rank 0 does, and the others serve it.

    The ranks stay connected until their scripts end, and those whose script ends first serve the rest.
    """

    def __init__(self, config: Config):
        """Connect to the other ranks. `config` has the deadlines.

        Raises:
            UserError: ranks are missing, or their number is not that of the configuration.
        """
        die_with_launcher()
        self.run_dir = Path(config.run.dir)
        self.stop = StopSignals("rank", grace_s=config.hardware.grace_s, resume_hint=lambda: resume_hint(self.run_dir))
        with self.stop:
            self.ranks = _join(config, self.stop)
        self.others = OtherRanks()
        self._workers: WorkerGroup[Worker] | None = None  # on ranks other than 0
        self._flags: list[bool] = []  # of this rank, while `on_any_rank` runs
        atexit.register(self._leave)

    @property
    def worker(self) -> Worker:
        """This rank's worker, on ranks other than 0."""
        assert self._workers is not None, "rank 0 has opened a run"
        return self._workers.local

    def open(self, config: Config) -> None:
        """Announce on rank 0 that it opens a run."""
        self.run_dir, self.others = Path(config.run.dir), OtherRanks()
        self.ranks.command(_Opens())

    def on_any_rank(self, flags: Sequence[bool], config: Config) -> list[bool]:
        """Return which of some flags are set on any rank. Every rank calls this.

        It is a call like the others, so that rank 0 may call something alone before.
        """
        self._flags = list(flags)
        try:
            return self.call("on_any_rank", self._ask_flags, config)
        finally:
            self._flags = []

    def _ask_flags(self) -> list[bool]:
        self.ranks.command(_AsksFlags(count=len(self._flags)))
        return self._combine(self._flags)

    def _combine(self, flags: Sequence[bool]) -> list[bool]:
        return [bool(self.ranks.all_reduce_max(flag)) for flag in flags]

    def call(
        self, what: str, act: Callable[[], T], config: Config, share: Callable[[T], Any] = lambda value: value
    ) -> T:
        """Do `act` on rank 0 while the others serve it. Every rank calls this.

        Args:
            what: name of the call, the same on every rank.
            act: called on rank 0 only.
            config: configuration of the run.
            share: makes of the result what the call returns on the other ranks.

        Raises:
            UserError, TrainingError, RunStopped: on rank 0, as `act` does; on the others a TrainingError or RunStopped.
        """
        with self.stop, _explaining_lost_peers(self.ranks):
            return cast(T, record(self._act if self.ranks.is_rank0 else self._serve)(what, act, config, share))

    def _act(self, what: str, act: Callable[[], T], config: Config, share: Callable[[T], Any]) -> T:
        try:
            value = act()
        except (UserError, TrainingError, RunStopped) as error:
            if self.others.waiting and not isinstance(error, RankDesyncError):
                stopped = int(error.code or 0) - 128 if isinstance(error, RunStopped) else None
                self.ranks.command(_Done(what=what, failed=True, stopped=stopped))
            raise
        self.ranks.command(_Done(what=what, value=share(value)))
        return value

    def _serve(self, what: str, act: Any, config: Config, share: Any) -> Any:
        while True:
            command: Any = self.ranks.command()
            if isinstance(command, _Opens):
                self._workers = None
                config = choose_engine(config, lambda _: None)
            elif isinstance(command, ChecksumTask):
                command.run(self.ranks)
            elif isinstance(command, _AsksFlags):
                self._combine(self._flags or [False] * command.count)
            elif isinstance(command, WorkerSpec):
                self._workers = WorkerGroup(_build(config, self.ranks, command), self.ranks)
            elif not isinstance(command, _Done):
                assert self._workers is not None, "rank 0 has opened a run"
                self._workers.answer(command)
            elif command.stopped is not None:
                raise RunStopped(command.stopped)
            elif command.failed:
                raise _rank0_failed()
            elif command.what == what:  # or a call of rank 0 alone
                return command.value

    def _leave(self) -> None:
        """Serve what rank 0 still calls, unless this script failed: then the launcher ends the others."""
        global _this_rank
        if getattr(sys, "last_value", None) is None:
            with suppress(Exception):
                if self.ranks.is_rank0:
                    self.ranks.command(_Done(what="exit"))
                else:
                    self._serve("exit", None, None, None)  # type: ignore[arg-type] # no run is opened by then
        _this_rank = self._workers = None
        del self.ranks  # the threads of a process group end with it, which must not be after Python
        leave_ranks()


_this_rank: ScriptRank | None = None


def script_rank(config: Config) -> ScriptRank:
    """Return this process's rank, which joins the others at the first call. Every rank calls this.

    Raises:
        UserError: ranks are missing, or their number is not that of the configuration.
    """
    global _this_rank
    if _this_rank is None:
        _this_rank = ScriptRank(config)
    return _this_rank


def _build(config: Config, ranks: Ranks, spec: WorkerSpec) -> Worker:
    """Build the worker of a rank other than 0.

    Raises:
        TrainingError: rank 0 failed.
    """
    resume_gc()
    try:
        return build_worker(config, ranks, spec, device=rank_device(config, ranks), tokenizer=None)
    except Rank0Failed:
        raise _rank0_failed() from None


def _rank0_failed() -> TrainingError:
    time.sleep(2)  # let rank 0 report its error first
    return TrainingError("rank 0 ended the run; see its message")


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
