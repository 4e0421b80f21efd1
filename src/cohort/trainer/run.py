"""A run from start to finish: read inputs, check memory, build the workers, train."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from cohort.config import Config
from cohort.display import ConsoleDisplay, Display, Displays, RunLog
from cohort.errors import RankDesyncError, StopRequested, TrainingError, UserError
from cohort.plan.defaults import replicas
from cohort.processes import openmp
from cohort.processes.page import start_page
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.stopping import RunStopped, StopSignals
from cohort.ranks.worker_group import WorkerGroup
from cohort.rewards.judge import prompt_hashes
from cohort.run.files import resume_hint
from cohort.run.folder import RunFolder, free_folder
from cohort.run.provenance import untested_versions
from cohort.run.result import RunResult
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.checkpoint import TrainerState
from cohort.trainer.checkpointer import find_checkpoint
from cohort.trainer.inputs import Inputs, describe_lost_updates
from cohort.trainer.loop import TrainingLoop
from cohort.trainer.open_run import OpenRun, open_run
from cohort.trainer.parts import Parts, changed_files, user_files
from cohort.trainer.preflight import choose_checkpointing, preflight
from cohort.trainer.setup import (
    build_run,
    check_disk_space,
    check_steps,
    initial_budget,
    open_engine,
    rank_device,
)


def train(
    config: Config,
    *,
    parts: Parts | None = None,
    resume: bool = False,
    display: Display | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Train, or resume from the last checkpoint if the run folder holds the same run.

    Args:
        config: configuration of the run.
        parts: tokenizer, rows, rewards and environments. Default: those that the configuration names.
        resume: raise if there is no run to resume.
        display: shows progress. Default: lines and a progress bar on the console.
        ranks: training processes; this one is rank 0, the others are in `work`.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
        TrainingError: the run failed.
        RunStopped: a signal stopped the run; its state is saved.
    """
    display = display or ConsoleDisplay(show_completions_every=config.run.show_completions_every)
    with (
        _releasing(ranks) as others,
        closing(display),
        reporting_stop(config, display, ranks.stop),
        open_run(config, parts, notify=display.notify, on_data_progress=display.data_progress) as run,
    ):
        loop = open_training(run, resume=resume, display=display, ranks=ranks, others=others)
        return loop if isinstance(loop, RunResult) else loop.run()


def open_training(
    run: OpenRun,
    *,
    resume: bool = False,
    display: Display,
    ranks: Ranks = SINGLE_PROCESS,
    others: "OtherRanks | None" = None,
) -> TrainingLoop | RunResult:
    """Prepare everything for the first step, or for the next one of a run that resumes.

    Args:
        run: closes what is opened here.
        resume: raise if there is no run to resume.
        display: shows progress.
        ranks: training processes; this one is rank 0.
        others: is told when the other ranks wait for a command.

    Returns:
        The loop; the result of the run if it is already finished.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
        TrainingError: the rollout engine cannot be started.
    """
    config, others = run.config, others or OtherRanks()
    config.check_settled()
    with others.busy():
        device = rank_device(config, ranks)
    inputs, schedule = run.inputs, run.inputs.schedule
    setup = open_engine(config, inputs)
    config, chosen = choose_checkpointing(config, inputs, setup, device=device, ranks=ranks)
    folder = run.enter(closing(RunFolder(config, resume=resume, judge_prompts=prompt_hashes(config.rewards))))
    inputs.rewards.stop = ranks.stop
    log = run.enter(RunLog(folder.path, processes=ranks.world_size, stop=ranks.stop))
    console, display = display, Displays(log, display)
    run.notify = display.notify
    if (summary := folder.summary()) is not None and summary["steps"] >= schedule.num_steps:
        return _finished_before(folder, summary, display.notify)
    placement = [inputs.rewards.describe_ranks()] if ranks.world_size > 1 else []
    for note in [*_start_notes(config, inputs, device), *placement, *chosen]:
        display.notify(note)
    checkpoint, state = find_checkpoint(folder.checkpoints_path, ranks, display.notify)
    check_steps(schedule, state, folder.path)
    plan = preflight(config, inputs, setup, device=device, ranks=ranks, notify=display.notify)
    if plan is not None and plan.communication is not None:
        display.notify(f"communication between GPUs: {plan.communication}")
    spec = WorkerSpec(
        folder=folder.path,
        num_steps=schedule.num_steps,
        checkpoint=checkpoint,
        micro_batch_tokens=initial_budget(config, inputs, state, ranks),
        longest_sequence_tokens=inputs.longest_sequence_tokens,
        gradient_checkpointing=config.model.gradient_checkpointing,
        dp_replicate=replicas(config) if plan is None else plan.workload.dp_replicate,
        sync_each_micro_batch=config.hardware.sync_each_micro_batch is not False
        if plan is None
        else not plan.workload.keeps_whole_gradients,
    )
    ranks.stop.check()
    with others.busy():
        ranks.command(spec)
        worker = build_worker(config, ranks, spec, device=device, tokenizer=inputs.tokenizer)
    check_disk_space(config, worker, folder.path)
    _begin(log, folder, config, state, num_steps=schedule.num_steps, notes=worker.policy.notes(), notify=display.notify)
    if config.run.view:
        _start_page(folder.path, console.notify)  # not in events.jsonl: the address holds a secret
    components = build_run(run, WorkerGroup(worker, ranks), state, setup=setup, folder=folder.path)
    if plan is not None:
        folder.write_plan(plan.as_json())
    return run.enter(closing(TrainingLoop(config, components, folder, display, memory_plan=plan)))


def _finished_before(folder: RunFolder, summary: dict[str, Any], notify: Callable[[str], None]) -> RunResult:
    notify(f"this run is already finished ({summary['steps']} steps): {folder.final_path}")
    notify(f"for a new run, use another folder: run.dir={free_folder(folder.path)}")
    return RunResult(run_dir=folder.path, final_dir=folder.final_path, summary=summary)


def _begin(
    log: RunLog,
    folder: RunFolder,
    config: Config,
    state: TrainerState | None,
    *,
    num_steps: int,
    notes: Iterable[str],
    notify: Callable[[str], None],
) -> None:
    """Show notes, remove what later steps left in the folder, and begin the log."""
    for note in notes:
        notify(note)
    steps_done, files = state.steps_done if state else 0, user_files(config)
    folder.rewind(steps_done, notify)
    for warning in changed_files(folder.path, files, steps_done=steps_done) if steps_done else ():
        notify(warning)
    log.begin(steps_done=steps_done, num_steps=num_steps, files=files)


_SPINNING = (
    "torch was imported before cohort, so its threads spin while they wait, which makes training several times slower "
    "if other programs use the same cores: import cohort first, or set OMP_WAIT_POLICY=PASSIVE"
)


def _start_notes(config: Config, inputs: Inputs, device: torch.device) -> list[str]:
    """Return messages for the start."""
    notes = inputs.notes(config.rollout.max_prompt_tokens)
    spins = openmp.spins and device.type == "cpu" and torch.get_num_threads() > 1
    own = filter(None, (describe_lost_updates(config), _SPINNING if spins else None))
    return [*own, *untested_versions(), *notes]


def _start_page(run_dir: Path, notify: Callable[[str], None]) -> None:
    """Start the page that shows the run. The run goes on without it."""
    try:
        notify(start_page(run_dir))
    except OSError as error:
        notify(f"run.view: {error}")


@contextmanager
def reporting_stop(config: Config, display: Display, stop: StopSignals) -> Iterator[None]:
    """Report the end of a run that was stopped before it had anything to save."""
    try:
        yield
    except RankDesyncError:
        raise
    except Exception as error:
        is_stop = isinstance(error, StopRequested)
        # another rank may have received it first; before there is anything to save, a library may have made another
        # exception of it
        number = stop.requested(within_s=10.0 if is_stop else 0.0)
        if number is None or (stop.can_save and not is_stop):
            raise
        display.notify(f"stopped by {number.name}, with nothing new to save; {resume_hint(Path(config.run.dir))}")
        raise RunStopped(number) from None


class OtherRanks:
    """Tracks whether the other ranks are waiting for a command."""

    waiting = True

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the other ranks as busy within the context, and after it if it fails."""
        self.waiting = False
        yield
        self.waiting = True


@contextmanager
def _releasing(ranks: Ranks) -> Iterator[OtherRanks]:
    """Release ranks that wait for a command when the run ends, however it ends."""
    others = OtherRanks()
    try:
        yield others
    except (UserError, TrainingError, RunStopped) as error:
        others.waiting &= not isinstance(error, RankDesyncError)
        raise
    except BaseException:
        others.waiting = False  # unknown state: this process exits, and its launcher ends the others
        raise
    finally:
        if others.waiting:
            ranks.end_commands()
