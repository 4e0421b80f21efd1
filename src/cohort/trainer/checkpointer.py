"""Save checkpoints: every `run.checkpoint_every` steps, and when a signal stops the run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cohort import stopping
from cohort.atomic_files import write_folder_atomically
from cohort.checkpoint import TrainerState
from cohort.config import RunConfig
from cohort.display import Display
from cohort.errors import RankDesyncError, StopRequested, TrainingError, UserError
from cohort.run_files import resume_hint
from cohort.run_folder import RunFolder
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


class Checkpointer:
    """Holds the state after the last finished step and saves it."""

    def __init__(
        self,
        config: RunConfig,
        workers: WorkerGroup[Worker],
        folder: RunFolder,
        *,
        state: TrainerState | None,
        display: Display,
    ):
        self.first_step = state.steps_done if state else 0
        self._config = config
        self._workers = workers
        self._folder = folder
        self._display = display
        self._state = state  # after the last finished step; None before the first one
        self._saved_steps = self.first_step  # step of the last checkpoint
        self._is_updating = False  # weights may have changed since that step

    def begin_update(self) -> None:
        """Announce that weights may change. From now on the step is finished before the run stops."""
        self._is_updating = True
        stopping.can_save()

    def finish_step(self, state: TrainerState) -> None:
        """Store the state after a step. It can be saved until weights change again."""
        self._state, self._is_updating = state, False
        stopping.can_save()

    def save(self) -> None:
        """Write a checkpoint of the last finished step.

        Raises:
            TrainingError: the disk is full, or the run folder was deleted.
        """
        assert self._state is not None, "no step is finished"
        self._folder.check_is_there()
        self._display.phase("checkpoint")
        self._workers.call(Worker.save, self._folder.checkpoints_path, self._state, keep=self._config.keep_checkpoints)
        self._saved_steps = self._state.steps_done
        self._display.saved(self._saved_steps)

    def save_final_model(self) -> None:
        """Save the trained model."""
        self._display.phase("checkpoint")

        def save(folder: Path) -> None:
            self._workers.call(Worker.save_model, folder)

        write_folder_atomically(self._folder.final_path, save)

    @contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """Save the last finished step if a signal stops the run within the context.

        Raises:
            RunStopped: after saving.
            StopRequested: if there is nothing to save.
        """
        try:
            yield
        except RankDesyncError:
            raise  # the other ranks are elsewhere: nothing can be saved with them
        except (UserError, TrainingError) as error:
            # a failure that the signal caused elsewhere may be noticed before the signal itself
            received = stopping.requested(within_s=stopping.SAME_SIGNAL_S)
            if received is None or (self._is_updating and not isinstance(error, StopRequested)):
                raise
            self._save_and_stop(received)

    def _save_and_stop(self, number: signal.Signals) -> None:
        """Drop the unfinished step, save the last finished one, and stop the run."""
        if self._state is None or self._state.steps_done == self.first_step:
            raise StopRequested("nothing to save")
        steps_done, kept = self._state.steps_done, "run the same command to resume"
        if self._config.checkpoint_every == 0:
            kept = f"not saved (run.checkpoint_every: 0); {resume_hint(self._folder.path)}"
        elif self._saved_steps < steps_done:
            self.save()
            kept = f"saved; {kept}"
        else:
            kept = f"already saved; {kept}"
        self._display.notify(f"stopped by {number.name} after step {steps_done}: {kept}")
        raise stopping.RunStopped(number)
