"""Start, watch and restart a run's processes on this machine, through torchrun's launcher API."""

import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cohort.config import Config, to_yaml
from cohort.config.hardware import HardwareConfig
from cohort.errors import TrainingError, UserError
from cohort.plan.layout import check_processes
from cohort.plan.split import GpuSplit
from cohort.processes.this_process import usable_cores
from cohort.ranks.stopping import LAUNCHER, LAUNCHER_GRACE_S, SIGNALS, STOP_EXIT_CODES, StopSignals
from cohort.rollout.engines.servers.placement import num_gpus, place, visible_devices
from cohort.run.files import checkpoints, read_metrics, resume_hint
from cohort.run.folder import LOGS, check_folder, make_folder
from cohort.run.result import EXIT_STATUS_FILE, ExitStatus

_TAIL_LINES = 8
_EXITED_EARLY = "exited with code 0 before the run had ended, as by os._exit in a reward or tool"
_NOTICED_LINES = 200  # a rank terminated later appends the stacks of all threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that caused the failure."""

    rank: int
    what: str  # "failed with exit code 1", "was killed by SIGKILL", "did not answer"
    stderr_file: Path
    stderr_tail: str

    def describe(self) -> str:
        """Describe the failure, with the end of the rank's stderr."""
        tail = f"; the last lines of its stderr:\n{self.stderr_tail}" if self.stderr_tail else "; its stderr is empty"
        return f"rank {self.rank} {self.what}{tail}\n({self.stderr_file})"


def read_failures(error: ChildFailedError, logs: Path) -> tuple[Failure, ...]:
    """Return the root causes among the failed ranks.

    Ranks that only noticed a missing peer, or were then terminated, are not causes. If no other rank failed, the cause
    is one that noticed nothing until it was terminated: it hung.
    """
    exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    files = {int(file.parent.name): file for file in logs.rglob("stderr.log")}
    noticed = {rank for rank, file in files.items() if "PeerError" in _tail(file, _NOTICED_LINES)}
    failed = {rank: code for rank, code in exit_codes.items() if rank not in noticed}
    terminated = {-signal.SIGTERM, -signal.SIGKILL, *STOP_EXIT_CODES}
    by_itself = {rank: code for rank, code in failed.items() if code not in terminated}
    killed = {rank: code for rank, code in failed.items() if code == -signal.SIGKILL}
    if by_itself:
        causes = {rank: _ending(code) for rank, code in by_itself.items()}
    elif noticed and (silent := _called_silent(files, noticed)):
        causes = dict.fromkeys(silent, f"did not answer its peers within hardware.timeout_s, or {_EXITED_EARLY}")
    else:
        causes = {rank: _ending(code) for rank, code in (killed or failed or exit_codes).items()}
    return tuple(
        Failure(rank=r, what=what, stderr_file=files.get(r, logs), stderr_tail=_tail(files.get(r), _TAIL_LINES))
        for r, what in sorted(causes.items())
    )


def early_exit(logs: Path) -> Failure:
    """Return the failure of a rank 0 that exited with code 0, like all others, without an exit status."""
    file = next(logs.rglob("0/stderr.log"), None)
    tail = _tail(file, _TAIL_LINES)
    return Failure(rank=0, what=_EXITED_EARLY, stderr_file=file or logs, stderr_tail=tail)


def _called_silent(files: Mapping[int, Path], noticed: set[int]) -> set[int]:
    """Return the ranks that every rank in `noticed` reports as silent; without reports, all other ranks."""
    silent = files.keys() - noticed
    for rank in noticed:
        for found in re.findall(r"ranks \[([\d, ]+)\] did not answer", _tail(files[rank], _NOTICED_LINES)):
            silent = silent & {int(number) for number in found.split(",")} or silent
    return silent


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        by_the_system = "; usually out of memory" if exit_code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exit_code).name} (exit code {exit_code}{by_the_system})"
    return f"failed with exit code {exit_code}"


def _tail(file: Path | None, num_lines: int) -> str:
    if file is None or not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-num_lines:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """Result of starting all processes once."""

    exit_status: ExitStatus | None  # as reported by rank 0; None if the processes failed
    failures: tuple[Failure, ...]  # root causes, if they failed
    made_progress: bool  # whether it finished at least one step


def run_processes(
    config: Config, *, num_processes: int, split: GpuSplit | None, resume: bool, notify: Callable[[str], None]
) -> None:
    """Train with `num_processes` processes and wait for the end.

    Args:
        config: configuration of the run.
        num_processes: initial number of processes; a rank that fails twice without a step in between is dropped.
        split: GPUs of this machine for training and rollouts; None if the run starts no servers.
        resume: whether the run must exist already.
        notify: called with messages for the user, such as a restart.

    Raises:
        UserError: the configuration does not work with this many processes, or rank 0 raised it.
        TrainingError: rank 0 raised it, or a process failed and no restarts are left.
    """
    check_processes(config, num_processes)
    check_folder(Path(config.run.dir), resume=resume)
    slots = list(range(num_processes))  # GPU indices, if there are GPUs
    failed_before: int | None = None
    for attempt in range(config.hardware.max_restarts + 1):
        result = _start(config, slots, split, resume=resume, attempt=attempt)
        if result.exit_status is not None:
            result.exit_status.raise_error()
            return
        report = "\n".join(failure.describe() for failure in result.failures)
        left = config.hardware.max_restarts - attempt
        if left == 0:
            also = ", or set hardware.max_restarts" if config.hardware.max_restarts == 0 else ""
            raise TrainingError(f"{report}\n{resume_hint(Path(config.run.dir))}{also}")
        culprit = slots[result.failures[0].rank] if len(result.failures) == 1 else None
        without = ""
        others = [slot for slot in slots if slot != culprit]
        can_go_on = bool(others) and (split is None or bool(split.servers_beside(others)))
        if culprit is not None and culprit == failed_before and not result.made_progress and can_go_on:
            slots = others
            without = (
                f" with {len(slots)} processes: rank {result.failures[0].rank} failed twice without a step in between"
            )
        failed_before = culprit
        resume = False  # the first start may have failed before it made the run folder
        found = checkpoints(Path(config.run.dir) / "checkpoints")
        notify(
            f"{report}\nrestarting{without} from {found[-1].name if found else 'the beginning'} ({left} restarts left)"
        )


def _start(config: Config, slots: list[int], split: GpuSplit | None, *, resume: bool, attempt: int) -> _Attempt:
    """Start the processes once and wait until all have ended, or one has failed and the others were stopped."""
    folder = Path(config.run.dir)
    logs = folder / LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{attempt}-{uuid.uuid4().hex[:4]}"
    make_folder(logs)
    config_file = logs / "config.yaml"
    config_file.write_text(to_yaml(config), encoding="utf-8")
    found = checkpoints(folder / "checkpoints")
    first_step = int(found[-1].name.removeprefix("step-")) if found else 0
    metrics_before = _identity(folder / "metrics.jsonl")
    environment = {EXIT_STATUS_FILE: str(logs / "exit_status.json")}
    if split is not None:
        environment |= place(config, split, slots).environment()
    environment |= _gpus_of_ranks(config, slots)
    failures, signal_code = _launch(
        ["-m", "cohort", "train", str(config_file), *(["--resume"] if resume else [])],
        len(slots),
        logs=logs,
        environment=environment,
        timeout_s=config.hardware.timeout_s,
        grace_s=config.hardware.grace_s,
    )
    exit_status = ExitStatus.read(logs / "exit_status.json")
    if exit_status is None and signal_code is not None:
        raise SystemExit(signal_code)
    if exit_status is None and not failures:
        failures = (early_exit(logs),)
    # compare file identity: metrics of an earlier start are not progress of this one
    made_progress = _identity(folder / "metrics.jsonl") != metrics_before and _last_step(folder) > first_step
    return _Attempt(exit_status=exit_status, failures=failures, made_progress=made_progress)


def run_script(script: Path, arguments: Sequence[str], *, num_processes: int) -> None:
    """Run a user's script on every rank, as torchrun does, and wait for the end.

    Raises:
        UserError: there is no such script.
        TrainingError: a process failed.
        SystemExit: a signal stopped the run after saving; the code is 128 plus its number.
    """
    if not script.is_file():
        raise UserError(f"{str(script)!r}: no such file; give a Python script that calls trainer.train()")
    if script.suffix in (".yaml", ".yml"):
        raise UserError(f"{str(script)!r} is a configuration; start it with `cohort train {script}`")
    logs, hardware = Path(tempfile.mkdtemp(prefix="cohort-launch-")), HardwareConfig()
    with StopSignals("launcher"):
        failures, signal_code = _launch(
            [str(script), *arguments],
            num_processes,
            logs=logs,
            environment={},
            timeout_s=hardware.timeout_s,
            grace_s=hardware.grace_s,
            shows_errors=True,
        )
    if failures:
        raise TrainingError("\n".join(failure.describe() for failure in failures))
    shutil.rmtree(logs, ignore_errors=True)
    if signal_code is not None:
        raise SystemExit(signal_code)


def _launch(
    arguments: Sequence[str],
    num_processes: int,
    *,
    logs: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    grace_s: float,
    shows_errors: bool = False,
) -> tuple[tuple[Failure, ...], int | None]:
    """Start Python on every rank, and wait until all have ended, or one has failed and the others were stopped.

    Args:
        arguments: of the interpreter.
        num_processes: number of ranks.
        logs: folder for their output. Rank 0 writes to the console.
        environment: additional environment variables.
        timeout_s: deadline of their rendezvous.
        grace_s: time that they may take to stop.
        shows_errors: whether rank 0's stderr is on the console, too.

    Returns:
        The root causes of a failure, and the exit code if a signal stopped the ranks.
    """
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        rdzv_configs={"timeout": timeout_s},
        local_addr="localhost",
        max_restarts=0,  # restarts are handled here, since each may use fewer ranks
        shutdown_timeout=math.ceil(grace_s) + LAUNCHER_GRACE_S,
        # do not let the launcher install handlers for ignored signals
        signals_to_handle=",".join(s.name for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN),
        # rank 0 writes to the console; the output of the others goes to files
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs),
            redirects={r: Std.ERR if r == 0 else Std.ALL for r in range(num_processes)},
            tee={0: Std.ERR} if shows_errors else Std.NONE,
        ),
        log_line_prefix_template=" ",  # instead of "[default0]:"
    )
    environment = {"OMP_NUM_THREADS": _threads(num_processes), LAUNCHER: str(os.getpid()), **environment}
    with environment_variables(environment), _quiet_launcher():
        try:
            elastic_launch(launch_config, sys.executable)(*arguments)
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            if codes <= STOP_EXIT_CODES:
                return (), error.get_first_failure()[1].exitcode
            return read_failures(error, logs), None
        except SignalException as error:
            return (), 128 + error.sigval
    return (), None


def _identity(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced or written to."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size


def _last_step(folder: Path) -> int:
    """Return the last step with metrics."""
    rows, _ = read_metrics(folder / "metrics.jsonl")
    return max((row["step"] for row in rows), default=0)


def _threads(num_processes: int) -> str:
    """Threads per process: an equal share of the available cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // num_processes))


def _gpus_of_ranks(config: Config, slots: list[int]) -> dict[str, str]:
    """Environment that gives each rank its GPU and hides those of the servers.

    The first GPUs train (see `cohort.plan.split`). A single process may have its GPU set by hardware.device.
    """
    if num_gpus(config) == 0 or ":" in config.hardware.device:
        return {}
    devices = visible_devices(config)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in slots)}


@contextmanager
def environment_variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's own report, and restore the signal handlers that it changes."""
    loggers = [
        logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    handlers: dict[int, Any] = {s: signal.getsignal(s) for s in SIGNALS}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
