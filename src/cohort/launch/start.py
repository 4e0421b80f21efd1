"""`cohort.train`: decide where a run executes. Training code is imported only by the processes that train."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cohort.config import Config, config_from_dict, load_config
from cohort.config.objects import unnamed_objects
from cohort.config.user_code import end_import
from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.launch.local import environment_variables, run_processes
from cohort.plan.split import count_processes
from cohort.ranks.collectives import Ranks
from cohort.ranks.join import started_by_torchrun
from cohort.ranks.stopping import StopSignals
from cohort.rollout.engines.auto import choose_engine
from cohort.rollout.engines.servers.placement import num_gpus, place, split_machine
from cohort.run.files import resume_hint
from cohort.run.result import RunResult


def train(
    config: Config | Mapping[str, Any] | str | Path, *, resume: bool = False, display: Display | None = None
) -> RunResult:
    """Train as configured, or resume from the last checkpoint if the run folder holds the same run.

    Runs with several processes (by default one per GPU) or with restarts are launched and waited for. Under torchrun
    this process becomes one rank.

    Args:
        config: a `Config`, an equivalent nested mapping, or the path of a YAML file. In the first two, functions and
            classes may be given instead of their paths, and rows (a list of dicts, a `datasets.Dataset` or an iterator)
            instead of the path of data.
        resume: whether the run must exist already.
        display: receives progress; by default the console. Only for runs in this process or under torchrun, which on a
            machine with several GPUs requires `hardware.processes: 1`.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
        TrainingError: the run cannot continue.
        SystemExit: SIGINT, SIGTERM, SIGHUP or SIGUSR1 stopped the run after saving; the code is 128 plus the signal's
            number.
    """
    end_import()
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    console = Console(stderr=True, highlight=False, markup=False)
    notify = lambda text: console.print(text, soft_wrap=True)  # noqa: E731
    run_dir = Path(config.run.dir)
    if started_by_torchrun():
        train_rank(config, resume=resume, display=display)
        return _result(run_dir)
    config = choose_engine(config, notify)
    split, found = split_machine(config), num_gpus(config)
    num_processes = split.num_processes if split else count_processes(config, found)
    if split is None and found > 1:
        what = "train and sample" if not config.rollout.uses_servers else "train"
        notify(f"{num_processes} of {found} GPUs {what} (hardware.processes: {config.hardware.processes})")
    stop_signals = partial(StopSignals, grace_s=config.hardware.grace_s, resume_hint=partial(resume_hint, run_dir))
    if num_processes == 1 and config.hardware.max_restarts == 0:
        from cohort.trainer.run import train as train_here

        placement = place(config, split, [0]).environment() if split else {}
        with environment_variables(placement), stop_signals("run") as stop:
            return train_here(config, resume=resume, display=display, ranks=Ranks(stop=stop))
    plural = "es" * (num_processes > 1)
    others = f"{num_processes} process{plural} and {config.hardware.max_restarts} restarts"
    _refuse_display(display, others)
    _refuse_objects(config, others)
    with stop_signals("launcher"):
        run_processes(config, num_processes=num_processes, split=split, resume=resume, notify=notify)
    return _result(run_dir)


def train_rank(config: Config, *, resume: bool, display: Display | None = None) -> None:
    """Run one rank of a run that a launcher started, and leave errors where the launcher looks for them.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
        TrainingError: the run failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from cohort.launch.rank import run_rank

    record(run_rank)(config, resume=resume, display=display)


def _refuse_display(display: Display | None, processes: str) -> None:
    """Refuse a display, which other processes cannot use.

    Raises:
        UserError: there is one.
    """
    if display is not None:
        raise UserError(
            f"display: only works with a run in this process, but this one has {processes}; use "
            f"hardware.processes: 1 and hardware.max_restarts: 0, or no display"
        )


def _refuse_objects(config: Config, processes: str) -> None:
    """Refuse objects that only this process has.

    Raises:
        UserError: there is one.
    """
    for field, name in unnamed_objects(config):
        instead = "a path" if field.endswith("path") else "a function or class at the top level of a file"
        raise UserError(
            f"{field}: {str(name)!r} exists in this process only, but the run has {processes}; use {instead}, or "
            f"hardware.processes: 1 and hardware.max_restarts: 0"
        )


def _result(folder: Path) -> RunResult:
    """Read the result of a run executed by other processes.

    Raises:
        TrainingError: the run did not finish.
    """
    if not (folder / "summary.json").is_file():
        raise TrainingError("rank 0 ended the run; see its message")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return RunResult(run_dir=folder, final_dir=folder / "final", summary=summary)
