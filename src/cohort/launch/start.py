"""`cohort.train`: decide where a run executes. Training code is imported only by the processes that train."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cohort import stopping
from cohort.auto_engine import choose_engine
from cohort.config import Config, config_from_dict, load_config
from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.launch.local import count_processes, environment_variables, run_processes
from cohort.placement import num_gpus, place, split_machine
from cohort.rendezvous import started_by_torchrun
from cohort.run_files import resume_hint
from cohort.run_result import RunResult


def train(
    config: Config | Mapping[str, Any] | str | Path, *, resume: bool = False, display: Display | None = None
) -> RunResult:
    """Train as configured; resumes from the last checkpoint if the run folder holds the same run.

    Runs with several processes (by default one per GPU) or with restarts are launched and waited for. Under torchrun
    this process becomes one rank.

    Args:
        config: a `Config`, an equivalent nested mapping, or the path of a YAML file.
        resume: require an existing run to resume.
        display: receives progress; by default lines and a bar on the console. Only for runs in this process, which on a
            machine with several GPUs needs `hardware.processes: 1`.

    Raises:
        UserError: something in the configuration, the data or a reward is wrong.
        TrainingError: the run cannot continue.
        SystemExit: SIGINT, SIGTERM, SIGHUP or SIGUSR1 stopped the run after saving; the code is 128 + the signal's
            number.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    console = Console(stderr=True, highlight=False, markup=False)
    notify = lambda text: console.print(text, soft_wrap=True)  # noqa: E731
    words = partial(resume_hint, Path(config.run.dir))
    in_processes = started_by_torchrun()
    if not in_processes:
        config = choose_engine(config, notify)
    split = None if in_processes else split_machine(config)
    num_processes = 1 if in_processes else split.num_processes if split else count_processes(config)
    if not in_processes and split is None and (found := num_gpus(config)) > 1:
        what = "train and sample" if not config.rollout.uses_servers else "train"
        notify(f"{num_processes} of {found} GPUs {what} (hardware.processes: {config.hardware.processes})")
    if not in_processes and num_processes == 1 and config.hardware.max_restarts == 0:
        from cohort import trainer

        placement = place(config, split, [0]).environment() if split else {}
        with (
            environment_variables(placement),
            stopping.handle_signals("run", grace_s=config.hardware.grace_s, resume_hint=words),
        ):
            return trainer.train(config, resume=resume, display=display)
    if display is not None:
        counted = f"{num_processes} process{'es' * (num_processes > 1)} and {config.hardware.max_restarts} restarts"
        raise UserError(
            f"display: only works with a run in this process, but this one has "
            f"{'ranks of torchrun' if in_processes else counted}; use hardware.processes: 1 and "
            f"hardware.max_restarts: 0, or no display"
        )
    if in_processes:
        from cohort.trainer import run_rank

        run_rank(config, resume=resume)
    else:
        with stopping.handle_signals("launcher", grace_s=config.hardware.grace_s, resume_hint=words):
            run_processes(config, num_processes=num_processes, split=split, resume=resume, notify=notify)
    return _result(Path(config.run.dir))


def _result(folder: Path) -> RunResult:
    """Read the result of a run executed by other processes.

    Raises:
        TrainingError: the run did not finish.
    """
    if not (folder / "summary.json").is_file():
        raise TrainingError("rank 0 ended the run; see its message")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return RunResult(run_dir=folder, final_dir=folder / "final", summary=summary)
