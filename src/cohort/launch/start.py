"""`cohort.train`: decides where a run runs. What trains is imported by the processes that do."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cohort import stopping
from cohort.choice import choose_engine
from cohort.config import Config, config_from_dict, load_config
from cohort.display import Display
from cohort.distributed import started_by_torchrun
from cohort.errors import TrainingError, UserError
from cohort.launch.local import count_processes, environment_of, run_processes
from cohort.outcome import RunResult
from cohort.placement import num_gpus, place, split_machine
from cohort.run_files import goes_on_from


def train(
    config: Config | Mapping[str, Any] | str | Path, *, resume: bool = False, display: Display | None = None
) -> RunResult:
    """Train as `config` says; goes on from the last checkpoint where its run folder holds the same run.

    A run of several processes, as on several GPUs by default, or with restarts is started and waited for. Under
    torchrun this process is one of them.

    Args:
        config: a `Config`, the same as a nested mapping, or the path of a YAML file.
        resume: insist that there is a run to go on with.
        display: what a person sees; by default lines and a bar on the console. For a run in this process only, which
            on a machine with several GPUs needs `hardware.processes: 1`.

    Raises:
        UserError: something in the configuration, the data or a reward does not work.
        TrainingError: the run cannot go on.
        SystemExit: SIGINT, SIGTERM, SIGHUP or SIGUSR1 asked it to end, and what there was to save is saved; the code
            is 128 + the signal's number.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    console = Console(stderr=True, highlight=False, markup=False)
    note = lambda text: console.print(text, soft_wrap=True)  # noqa: E731
    words = partial(goes_on_from, Path(config.run.dir))
    in_processes = started_by_torchrun()
    if not in_processes:
        config = choose_engine(config, note)
    split = None if in_processes else split_machine(config)
    num_processes = 1 if in_processes else split.num_processes if split else count_processes(config)
    if not in_processes and split is None and (found := num_gpus(config)) > 1:
        what = "train and sample" if not config.rollout.uses_servers else "train"
        note(f"{num_processes} of {found} GPUs {what} (hardware.processes: {config.hardware.processes})")
    if not in_processes and num_processes == 1 and config.hardware.max_restarts == 0:
        from cohort import trainer

        placement = place(config, split, [0]).environment() if split else {}
        with environment_of(placement), stopping.watching("run", grace_s=config.hardware.grace_s, goes_on_from=words):
            return trainer.train(config, resume=resume, display=display)
    if display is not None:
        counted = f"{num_processes} process{'es' * (num_processes > 1)} and {config.hardware.max_restarts} restarts"
        raise UserError(
            f"display: works with a run in this process only, and this one has "
            f"{'ranks of torchrun' if in_processes else counted}; use hardware.processes: 1 and "
            f"hardware.max_restarts: 0, or no display"
        )
    if in_processes:
        from cohort.trainer import run_rank

        run_rank(config, resume=resume)
    else:
        with stopping.watching("launcher", grace_s=config.hardware.grace_s, goes_on_from=words):
            run_processes(config, num_processes=num_processes, split=split, resume=resume, note=note)
    return _result(Path(config.run.dir))


def _result(folder: Path) -> RunResult:
    """What other processes have made of a run.

    Raises:
        TrainingError: they have not got to its end.
    """
    if not (folder / "summary.json").is_file():
        raise TrainingError("rank 0 has ended the run, and says why")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return RunResult(run_dir=folder, final_dir=folder / "final", summary=summary)
