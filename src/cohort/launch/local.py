"""The processes of a run on this machine: started, watched and restarted through torchrun's launcher API."""

import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cohort import stopping
from cohort.config import Config, to_yaml
from cohort.errors import TrainingError, UserError
from cohort.launch.report import Failure, read_failures
from cohort.outcome import OUTCOME_FILE, Outcome
from cohort.placement import num_gpus, place, visible_devices
from cohort.plan.layout import check_processes
from cohort.plan.split import GpuSplit
from cohort.run_files import checkpoints, read_metrics
from cohort.run_folder import LOGS, check_folder, make_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One start of all processes."""

    outcome: Outcome | None  # what rank 0 has to say; None where the processes failed
    failures: tuple[Failure, ...]  # the causes, where they failed
    made_progress: bool  # whether it finished at least one step


def run_processes(
    config: Config, *, num_processes: int, split: GpuSplit | None, resume: bool, note: Callable[[str], None]
) -> None:
    """Train with `num_processes` processes and wait for the end.

    Args:
        config: of the run.
        num_processes: at the start; a rank that keeps failing is left out.
        split: of this machine's GPUs between training and sampling; None where the run starts no servers.
        resume: insist that there is a run to go on with.
        note: called with what a person should know, such as a restart.

    Raises:
        UserError: the configuration does not suit so many processes; or as told by rank 0.
        TrainingError: rank 0 says why the run cannot go on, or a process failed and no restart is left.
    """
    check_processes(config, num_processes)
    check_folder(Path(config.run.dir), resume=resume)
    slots = list(range(num_processes))  # of GPUs, where there are any
    failed_before: int | None = None
    for attempt in range(config.hardware.max_restarts + 1):
        result = _start(config, slots, split, resume=resume, attempt=attempt)
        if result.outcome is not None:
            result.outcome.raise_error()
            return
        story = "\n".join(failure.told() for failure in result.failures)
        left = config.hardware.max_restarts - attempt
        if left == 0:
            raise TrainingError(f"{story}\n{_how_to_go_on(config)}")
        culprit = slots[result.failures[0].rank] if len(result.failures) == 1 else None
        without = ""
        if culprit is not None and culprit == failed_before and not result.made_progress and len(slots) > 1:
            slots.remove(culprit)
            without = f" with {len(slots)} processes: rank {result.failures[0].rank} failed twice with no step between"
        failed_before = culprit
        resume = False  # the first start may have failed before the run folder was there
        found = checkpoints(Path(config.run.dir) / "checkpoints")
        note(f"{story}\nrestarting{without} from {found[-1].name if found else 'the beginning'} ({left} restarts left)")


def count_processes(config: Config) -> int:
    """How many processes `hardware.processes` means on this machine.

    Raises:
        UserError: more than there are GPUs.
    """
    wanted, device = config.hardware.processes, config.hardware.device
    if wanted == 1 or device == "cpu":
        return 1 if wanted == "auto" else wanted
    gpus = num_gpus(config)
    if wanted == "auto":
        return max(1, gpus)
    if 0 < gpus < wanted:
        raise UserError(
            f"hardware.processes: {wanted} is more than this machine's {gpus} GPUs, and each process needs its own; "
            f"use at most {gpus}, or device: cpu"
        )
    return wanted


def _start(config: Config, slots: list[int], split: GpuSplit | None, *, resume: bool, attempt: int) -> _Attempt:
    """Start the processes once and wait until they have all ended, or one has failed and the others were stopped."""
    folder = Path(config.run.dir)
    logs = folder / LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{attempt}-{uuid.uuid4().hex[:4]}"
    make_folder(logs)
    config_file = logs / "config.yaml"
    config_file.write_text(to_yaml(config), encoding="utf-8")
    found = checkpoints(folder / "checkpoints")
    first_step = int(found[-1].name.removeprefix("step-")) if found else 0
    metrics_before = _identity(folder / "metrics.jsonl")
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(slots),
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        rdzv_configs={"timeout": config.hardware.timeout_s},
        local_addr="localhost",
        max_restarts=0,  # ours: each start looks at what is left to start with
        shutdown_timeout=math.ceil(config.hardware.grace_s) + stopping.LATER_S,
        # the launcher would replace the handler of a signal that is ignored
        signals_to_handle=",".join(s.name for s in stopping.SIGNALS if signal.getsignal(s) != signal.SIG_IGN),
        # rank 0 talks to the console; what the others say is kept
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects={r: Std.ERR if r == 0 else Std.ALL for r in range(len(slots))}
        ),
    )
    environment = {OUTCOME_FILE: str(logs / "outcome.json"), "OMP_NUM_THREADS": _threads(len(slots))}
    environment |= {stopping.LAUNCHER: str(os.getpid())}
    if split is not None:
        environment |= place(config, split, slots).environment()
    environment |= _gpus_of_ranks(config, slots)
    arguments = ["-m", "cohort.train", str(config_file), *(["--resume"] if resume else [])]
    failures: tuple[Failure, ...] = ()
    code_of_signal: int | None = None  # exit code
    with environment_of(environment), _quiet_launcher():
        try:
            stopping.can_save()  # from here on a signal is for the ranks
            elastic_launch(launch_config, sys.executable)(*arguments)
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            if codes <= stopping.CODES:
                code_of_signal = error.get_first_failure()[1].exitcode
            else:
                failures = read_failures(error, logs)
        except SignalException as error:
            code_of_signal = 128 + error.sigval
    stopping.can_save(False)
    outcome = Outcome.read(logs / "outcome.json")
    if outcome is None and code_of_signal is not None:
        raise SystemExit(code_of_signal)
    # what an earlier start has written counts for nothing: a start that gets to its first step replaces the file
    made_progress = _identity(folder / "metrics.jsonl") != metrics_before and _last_step(folder) > first_step
    if outcome is None and not failures:
        raise TrainingError(f"all processes ended and rank 0 left no word of how; its output is in {logs}")
    return _Attempt(outcome=outcome, failures=failures, made_progress=made_progress)


def _how_to_go_on(config: Config) -> str:
    if config.hardware.max_restarts == 0:
        return "The same command goes on from the last checkpoint; hardware.max_restarts: 3 would do so by itself"
    return "The same command goes on from the last checkpoint"


def _identity(file: Path) -> tuple[int, int] | None:
    """Changes when a file is replaced or written to."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size


def _last_step(folder: Path) -> int:
    """The last step of which there are metrics."""
    rows, _ = read_metrics(folder / "metrics.jsonl")
    return max((row["step"] for row in rows), default=0)


def _threads(num_processes: int) -> str:
    """Threads of each process: an equal share of the cores that this one may use."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // num_processes))


def _gpus_of_ranks(config: Config, slots: list[int]) -> dict[str, str]:
    """The GPUs that the ranks see: each takes that of its number, and the servers' are not among them.

    The first GPUs train (`cohort.plan.split`). One process may be told which by hardware.device.
    """
    if num_gpus(config) == 0 or ":" in config.hardware.device:
        return {}
    devices = visible_devices(config)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in slots)}


@contextmanager
def environment_of(values: dict[str, str]) -> Iterator[None]:
    """These variables for the processes that are started inside."""
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
    """Our own report instead of the launcher's; and the signal handlers, which it changes, as they were."""
    loggers = [
        logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    handlers: dict[int, Any] = {s: signal.getsignal(s) for s in stopping.SIGNALS}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
