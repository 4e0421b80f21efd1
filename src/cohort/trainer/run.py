"""A run from beginning to end: what is read, foreseen, built, and trained."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cohort import stopping
from cohort.config import Config
from cohort.display import ConsoleDisplay, Display
from cohort.distributed import ALONE, Ranks
from cohort.errors import OutOfStepError, StopRequested, TrainingError, UserError
from cohort.rewards import RewardMarker
from cohort.run_files import resume_hint
from cohort.run_folder import REWARD_MARKER, RunFolder
from cohort.run_result import RunResult
from cohort.startup import resume_gc
from cohort.stopping import RunStopped
from cohort.trainer.build import BuildOrder, build_worker
from cohort.trainer.loop import Trainer
from cohort.trainer.preflight import compared, foresee
from cohort.trainer.resume import find_checkpoint
from cohort.trainer.rollout_engines import find_engine
from cohort.trainer.run_inputs import read_inputs
from cohort.trainer.setup import (
    build_run,
    check_disk_space,
    check_steps,
    rank_device,
)
from cohort.trainer.token_budget import first_budget
from cohort.trainer.worker_group import WorkerGroup


def train(config: Config, *, resume: bool = False, display: Display | None = None, ranks: Ranks = ALONE) -> RunResult:
    """Train as `config` says; goes on from the last checkpoint where its run folder holds the same run.

    Args:
        config: of the run.
        resume: insist that there is a run to go on with.
        display: what a person sees; by default lines and a bar on the console.
        ranks: the processes of the run; this one is rank 0, and the others are in `work`.

    Raises:
        UserError: something in the configuration, the data or a reward does not work.
        TrainingError: the run cannot go on.
        RunStopped: a signal asked it to end, and it has saved what there was.
    """
    resume_gc()
    display = display or ConsoleDisplay(show_completions_every=config.run.show_completions_every)
    with _others_are_told(ranks) as others, closing(display), _told_of_stop(config, display):
        with others.taking_part():
            device = rank_device(config, ranks)
        inputs = read_inputs(config)
        setup = find_engine(config, inputs)
        with closing(RunFolder(config, resume=resume)) as folder:
            finished = folder.finished_steps()
            if finished is not None and finished >= inputs.plan.num_steps:
                display.note(f"this run is finished ({finished} steps): {folder.final_path}")
                return RunResult(run_dir=folder.path, final_dir=folder.final_path, summary=folder.summary())
            inputs.rewards.marker = marker = RewardMarker(folder.path / REWARD_MARKER)
            if (ended := marker.last_crash()) is not None:
                display.note(ended)
            for note in inputs.notes(config.rollout.max_prompt_tokens):
                display.note(note)
            checkpoint, state = find_checkpoint(folder.checkpoints_path, ranks, display.note)
            check_steps(inputs.plan, state, folder.path)
            foreseen = foresee(config, inputs, setup, device=device, world_size=ranks.world_size, note=display.note)
            order = BuildOrder(
                folder=folder.path,
                num_steps=inputs.plan.num_steps,
                checkpoint=checkpoint,
                micro_batch_tokens=first_budget(config, inputs, state, ranks),
                longest_sequence_tokens=inputs.longest_path_tokens,
            )
            stopping.check()
            with others.taking_part():
                ranks.command(order)
                worker = build_worker(config, ranks, order, device=device, tokenizer=inputs.tokenizer)
            workers = WorkerGroup(worker, ranks)
            check_disk_space(config, worker, folder.path)
            for note in worker.policy.notes():
                display.note(note)
            folder.rewind(state.steps_done if state else 0, display.note)
            run = build_run(config, inputs, workers, state, setup=setup, folder=folder.path, note=display.note)
            if foreseen is not None:
                folder.write_plan(foreseen.as_json())
            with closing(run.rollout):
                result = Trainer(config, run, folder, display).run()
            if foreseen is not None and (told := compared(foreseen, folder.metric_history("memory/peak_bytes"))):
                display.note(told)
            return result


@contextmanager
def _told_of_stop(config: Config, display: Display) -> Iterator[None]:
    """The end of a run that was asked to end before it had anything to save."""
    try:
        yield
    except StopRequested:
        number = stopping.requested(within_s=10.0)  # another rank may have known earlier
        assert number is not None, "whoever raises it was asked"
        display.note(f"stopped by {number.name}, with nothing new to save; {resume_hint(Path(config.run.dir))}")
        raise RunStopped(number) from None


class _Others:
    """The other ranks: whether they wait for a command, as they do but in the midst of something that all do."""

    wait = True

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """They do something together with rank 0 inside; where that fails, they do not wait."""
        self.wait = False
        yield
        self.wait = True


@contextmanager
def _others_are_told(ranks: Ranks) -> Iterator[_Others]:
    """At the end of the run, however it ends, those who wait for a command are let go."""
    others = _Others()
    try:
        yield others
    except (UserError, TrainingError, RunStopped) as error:
        others.wait &= not isinstance(error, OutOfStepError)
        raise
    except BaseException:
        others.wait = False  # where they are nobody knows: this process ends, and what started them ends the others
        raise
    finally:
        if others.wait:
            ranks.end_commands()
