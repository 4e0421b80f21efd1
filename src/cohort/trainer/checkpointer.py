"""Save checkpoints regularly and when a signal stops the run, and resume from the newest intact one."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.config import RunConfig
from cohort.display import Display
from cohort.errors import RankDesyncError, StopRequested, TrainingError, UserError
from cohort.ranks.collectives import Ranks
from cohort.ranks.stopping import SAME_SIGNAL_S, RunStopped
from cohort.ranks.worker_group import WorkerGroup
from cohort.run.atomic import write_folder_atomically
from cohort.run.files import DAMAGED, Checksums, checkpoints, find_damage, read_manifest, resume_hint, split_by_size
from cohort.run.folder import RunFolder
from cohort.trainer.checkpoint import TrainerState, load_trainer_state
from cohort.trainer.worker import Worker

_SLOW_BYTES = 4_000_000_000  # verifying more than this takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumTask:
    """Verify the files of a checkpoint against its manifest, a share of them on each rank."""

    folder: Path
    shares: Sequence[Checksums]  # one per rank

    def run(self, ranks: Ranks) -> list[list[str]] | None:
        """Return the problems found by each rank on rank 0; None on other ranks. Every rank calls this."""
        return ranks.gather(find_damage(self.folder, self.shares[ranks.rank]))


def find_checkpoint(root: Path, ranks: Ranks, notify: Callable[[str], None]) -> tuple[Path | None, TrainerState | None]:
    """Return the newest intact checkpoint and its state; both None if there is no checkpoint. Called on rank 0.

    Damaged checkpoints are reported and renamed to `damaged-step-N`. The other ranks help with `ChecksumTask`.

    Args:
        root: folder of the checkpoints.
        ranks: training processes.
        notify: shows a message to the user.

    Raises:
        UserError: all checkpoints are damaged, or the newest intact one has an unsupported version. None is renamed.
    """
    damaged: list[tuple[Path, list[str]]] = []
    found: Path | None = None
    state: TrainerState | None = None
    for path in reversed(checkpoints(root)):
        problems = _verify(path, ranks, notify)
        if not problems:
            try:
                found, state = path, load_trainer_state(path)
                break
            except (OSError, json.JSONDecodeError, AttributeError, TypeError) as error:  # possible without a manifest
                problems = [f"trainer_state.json cannot be read: {error}"]
        damaged.append((path, problems))
    messages = [f"checkpoint {path.name} is damaged: {'; '.join(problems[:3])}" for path, problems in damaged]
    if damaged and found is None:
        listed = "\n".join(messages)
        raise UserError(
            f"run.dir: {str(root.parent)!r} has no intact checkpoint to resume from.\n{listed}\nRestore the files, "
            f"or use a new run.dir to start over"
        )
    for (path, _), message in zip(damaged, messages, strict=True):
        renamed = _rename_damaged(path)
        assert found is not None
        notify(f"{message}. Renamed to {renamed.name}; resuming from {found.name}")
    return found, state


def _verify(path: Path, ranks: Ranks, notify: Callable[[str], None]) -> list[str]:
    """Return the problems of a checkpoint; empty if it is intact."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    if manifest is None:
        notify(f"checkpoint {path.name} has no manifest (written by an earlier version): its files are not verified")
        return []
    task = ChecksumTask(folder=path, shares=split_by_size(manifest, ranks.world_size))
    if (num_bytes := sum(size for size, _ in manifest.values())) >= _SLOW_BYTES:
        notify(f"verifying {path.name} ({num_bytes / 1e9:.0f} GB)")
    ranks.command(task)
    problems = task.run(ranks)
    assert problems is not None, "rank 0 gathers"
    return [problem for rank_problems in problems for problem in rank_problems]


def _rename_damaged(path: Path) -> Path:
    target, number = path.with_name(f"{DAMAGED}{path.name}"), 2
    while target.exists():
        target, number = path.with_name(f"{DAMAGED}{path.name}-{number}"), number + 1
    return path.rename(target)


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
        self._stop = workers.ranks.stop
        self._folder = folder
        self._display = display
        self._state = state  # after the last finished step; None before the first one
        self._saved_steps = self.first_step  # step of the last checkpoint
        self._is_updating = False  # weights may have changed since that step

    def begin_update(self) -> None:
        """Announce that weights may change. From now on the step is finished before the run stops."""
        self._is_updating = True
        self._stop.can_save = True

    def finish_step(self, state: TrainerState) -> None:
        """Store the state after a step. It can be saved until weights change again."""
        self._state, self._is_updating = state, False
        self._stop.can_save = True

    def amend(self, **changes: Any) -> None:
        """Change what the next checkpoint of the last finished step says."""
        if self._state is not None:
            self._state = replace(self._state, **changes)

    def save(self) -> None:
        """Write a checkpoint of the last finished step.

        Raises:
            TrainingError: the disk is full, or the run folder was deleted.
        """
        assert self._state is not None, "no step is finished"
        self._folder.check_is_there()
        self._folder.wait_for_files()
        self._display.phase("checkpoint")
        self._workers.call(Worker.save, self._folder.checkpoints_path, self._state, keep=self._config.keep_checkpoints)
        self._saved_steps = self._state.steps_done
        self._display.saved(self._saved_steps)

    def save_if_due(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one, or the run saves none."""
        if self._config.checkpoint_every and self._state is not None and self._saved_steps < self._state.steps_done:
            self.save()

    @property
    def last_path(self) -> Path:
        """Folder of the last checkpoint."""
        return self._folder.checkpoints_path / f"step-{self._saved_steps}"

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
            received = self._stop.requested(within_s=SAME_SIGNAL_S)
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
        raise RunStopped(number)
