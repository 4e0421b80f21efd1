"""The output folder of TRL: `checkpoint-N` folders, each with the checkpoint of Cohort that resumes from it.

checkpoint-N/{model files, trainer_state.json, cohort/step-M/...}  cohort/  cohort-2/  earlier/checkpoint-N/

The checkpoints in the folder are those of its last run. A run moves those that it would replace to `earlier`.
"""

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from transformers.trainer_callback import TrainerState

from cohort.config import Config, to_yaml
from cohort.errors import UserError
from cohort.run.atomic import write_folder_atomically
from cohort.run.files import MANIFEST, STATE, checkpoints
from cohort.run.folder import LOGS, free_folder

_RUN = "cohort"  # begins the names of run folders
EARLIER = "earlier"
_TRAINER_STATE = "trainer_state.json"
_LINKED = (".safetensors", ".distcp", ".parquet")  # files that are never changed in place
_NOT_COPIED = ("checkpoints", "final", ".lock", LOGS, "summary.json", "status.json", "tokens")


class OutputFolder:
    """`args.output_dir`."""

    def __init__(self, path: Path):
        """`path` may not exist yet."""
        self.path = path

    def new_run(self) -> Path:
        """Return the folder of a new run."""
        return free_folder(self.path / _RUN)

    def checkpoints(self) -> list[Path]:
        """Return the `checkpoint-N` folders in order."""
        found = [p for p in self.path.glob("checkpoint-*") if p.name.rpartition("-")[2].isdecimal()]
        return sorted(found, key=number)

    def find(self, wanted: str | bool) -> "Checkpoint":
        """Return the checkpoint with a path, or the last one.

        Raises:
            UserError: there is none, or it cannot be resumed.
        """
        found = self.checkpoints()
        if isinstance(wanted, bool) and not found:
            raise UserError(f"resume_from_checkpoint: {str(self.path)!r} has no checkpoint-N; leave it out")
        folder = found[-1] if isinstance(wanted, bool) else Path(wanted)
        steps = sorted(folder.glob(f"{_RUN}*/step-*"))
        if not steps or not (folder / _TRAINER_STATE).is_file():
            known = ", ".join(p.name for p in found if any(p.glob(f"{_RUN}*/step-*"))) or "none"
            raise UserError(
                f"resume_from_checkpoint: {str(folder)!r} has no state that Cohort resumes from; use one of {known} in "
                f"{str(self.path)!r}, or give its path as the model and start a new run"
            )
        outer = folder.absolute().parent
        home = outer.parent if outer.name.partition("-")[0] == EARLIER else outer
        home = self.path if home.resolve() == self.path.resolve() else home
        return Checkpoint(folder, run=home / steps[0].parent.name, step=steps[0])

    def ancestors(self, checkpoint: "Checkpoint") -> list[Path]:
        """Return the checkpoints that a run goes through on its way to one in this folder, and that one."""
        own, is_here = self.checkpoints(), checkpoint.run.parent == self.path
        if is_here and any(p.samefile(checkpoint.folder) for p in own):
            return [p for p in own if number(p) <= number(checkpoint.folder)]  # also of runs that were copied
        run = checkpoint.run.name
        return [p for p in own if is_here and number(p) < number(checkpoint.folder) and (p / run).is_dir()]

    def best_model(self, checkpoint: "Checkpoint", state: TrainerState) -> str | None:
        """Return where the best model of a run is, whose checkpoints may have been moved.

        Args:
            checkpoint: of the run.
            state: of the checkpoint.
        """
        if (said := state.best_model_checkpoint) is None:
            return None
        moved = sorted(self.path.glob(f"{EARLIER}*/{Path(said).name}"), key=lambda p: number(p.parent))
        for folder in (Path(said), checkpoint.folder.parent / Path(said).name, *reversed(moved)):
            with suppress(OSError, ValueError, TypeError):
                logs = TrainerState.load_from_json(str(folder / _TRAINER_STATE)).log_history
                if repr(logs) == repr(state.log_history[: len(logs)]):
                    return str(folder)
        return said

    def write(self, step: Path, state: TrainerState, *, with_state: bool = True) -> Path:
        """Write `checkpoint-N` with the files of a checkpoint of Cohort, whose large ones are shared.

        Args:
            step: folder of the checkpoint, in that of its run.
            state: of N optimizer steps.
            with_state: whether a run can resume from it.
        """
        folder = self.path / f"checkpoint-{state.global_step}"

        def write(partial: Path) -> None:
            for file in step.iterdir():
                if file.is_file() and file.name not in (STATE, MANIFEST):
                    _link(file, partial / file.name)
            if with_state:
                shutil.copytree(step, partial / step.parents[1].name / step.name, copy_function=_link)
            state.save_to_json(str(partial / _TRAINER_STATE))

        write_folder_atomically(folder, write)
        return folder

    def set_aside(self, model: object, *, but: Collection[Path] = ()) -> list[Path]:
        """Move checkpoints to `earlier`, and return where they are.

        Args:
            model: of the run, which must not be moved.
            but: checkpoints that stay.

        Raises:
            UserError: the model is one of them.
        """
        moved = [folder for folder in self.checkpoints() if folder not in but]
        if isinstance(model, str) and any(Path(model).resolve().is_relative_to(folder.resolve()) for folder in moved):
            raise UserError(f"output_dir: {str(self.path)!r} has the model, {model!r}; use another output_dir")
        if moved:
            target = free_folder(self.path / EARLIER)
            target.mkdir()
            moved = [folder.rename(target / folder.name) for folder in moved]
        return moved

    def keep_last(self, count: int, *, and_also: Collection[str]) -> None:
        """Delete all checkpoints but the last ones and those with a path in `and_also`."""
        for folder in self.checkpoints()[:-count]:
            if str(folder) not in and_also:
                shutil.rmtree(folder)


class Checkpoint:
    """A `checkpoint-N` that a run can resume from."""

    def __init__(self, folder: Path, *, run: Path, step: Path):
        """A checkpoint folder; files are read later.

        Args:
            folder: of the checkpoint.
            run: folder of its run, which may be gone.
            step: checkpoint of Cohort in it.
        """
        self.folder, self.run, self._step = folder, run, step

    def state(self) -> TrainerState:
        """Return the state of callbacks and logs."""
        return TrainerState.load_from_json(str(self.folder / _TRAINER_STATE))

    def run_dir(self, output: OutputFolder) -> Path:
        """Return the folder in which a run goes on from here: a new one unless its run is there and ends here."""
        last = checkpoints(self.run / "checkpoints")[-1:]
        ends_here = bool(last) and last[0].name == self._step.name and _manifest(last[0]) == _manifest(self._step)
        return self.run if ends_here and self.run.parent == output.path else output.new_run()

    def prepare(self, run_dir: Path, config: Config) -> None:
        """Make `run_dir` the folder of a run with this checkpoint as its last one.

        Args:
            run_dir: result of `run_dir`.
            config: of a new run, for a checkpoint whose run is gone.
        """
        if run_dir.is_dir():
            (run_dir / "summary.json").unlink(missing_ok=True)  # or a finished run would have nothing to load
            return
        if self.run.is_dir():
            ignored = shutil.ignore_patterns(*_NOT_COPIED)
            shutil.copytree(self.run, run_dir, copy_function=_link, ignore=ignored)
            before, text = self.run, (run_dir / "config.yaml").read_text(encoding="utf-8")
        else:
            run_dir.mkdir(parents=True)
            before, text = Path(config.run.dir), to_yaml(config)
        text = text.replace(f"{before.absolute()}/", f"{run_dir.absolute()}/")
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
        shutil.copytree(self._step, run_dir / "checkpoints" / self._step.name, copy_function=_link)


def _manifest(step: Path) -> bytes | None:
    """Return the checksums of a checkpoint's files as they are written."""
    return (step / MANIFEST).read_bytes() if (step / MANIFEST).is_file() else None


def number(folder: Path) -> int:
    """Return N of `checkpoint-N`."""
    found = re.findall(r"(\d+)$", folder.name)
    return int(found[0]) if found else 0


def _link(source: str | Path, target: str | Path) -> None:
    """Copy a file; a large one that nobody changes becomes a second name of the same file where the disk has them."""
    if Path(source).suffix in _LINKED:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)
