"""Save and load checkpoints.

A checkpoint is a model folder (weights, config, tokenizer) plus the trainer's state: `trainer_state.json`, the critic's
folder if there is one, and the engine's state (optimizers, and the weights of a reference that changes), sharded by
torch.distributed.checkpoint, so any number of ranks can load it. It is written atomically (`cohort.run.atomic`): a
kill at any time leaves the previous checkpoint intact.
"""

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # keys as in the files
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cohort.errors import UserError
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.run.atomic import disk_errors, flush, write_folder_atomically
from cohort.run.files import STATE, Checksums, checkpoints, checksums_in_background, write_manifest

if TYPE_CHECKING:  # code that only inspects checkpoints should not import transformers
    from cohort.models import Critic, Policy, SaveOptions

_OPTIMIZER = "optimizer"
_BUILTIN = "an optimizer of Cohort's"
CRITIC = "critic"  # subfolder of the critic in a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of a run besides weights and optimizers, saved as JSON."""

    steps_done: int
    data: Mapping[str, Any]  # position in the dataset
    pending: Sequence[Mapping[str, int]]  # prompts taken but not trained on yet, see `Prefetcher`
    num_tokens: int  # prompt and completion tokens trained on so far
    seconds: float  # wall-clock time so far
    micro_batch_tokens: int  # token budget as measured, or halved after out-of-memory
    micro_batch_tokens_wanted: int | Literal["auto"]  # as configured
    processes: int  # the number of ranks it was measured with
    control: Mapping[str, Any]  # state of adaptive coefficients, see `CoefficientState`


def save_checkpoint(
    root: Path,
    *,
    policy: "Policy",
    critic: "Critic | None" = None,
    tokenizer: Any,
    engine_state: Mapping[str, Any],
    state: TrainerState,
    keep: int,
    ranks: Ranks = SINGLE_PROCESS,
    save_options: "SaveOptions | None" = None,
) -> Path:
    """Write `root/step-N` and delete all but the last `keep` checkpoints. Called on every rank.

    Raises:
        TrainingError: writing failed, e.g. the disk is full; earlier checkpoints are intact.
    """

    from cohort.models import save_policy

    def write(folder: Path) -> None:
        with disk_errors(folder):
            _save_engine_state(engine_state, folder / _OPTIMIZER, ranks)
            written = save_policy(policy, tokenizer, folder, ranks, save_options)
            if critic is not None:
                written |= save_policy(critic, tokenizer, folder / CRITIC, ranks, save_options)
            if ranks.is_rank0:
                (folder / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            checksums = ranks.gather(_flush_own_files(folder, written, ranks))
            if checksums is not None:
                write_manifest(folder, {name: found for own in checksums for name, found in own.items()})

    def announce_and_write(folder: Path) -> None:
        announced.append(ranks.broadcast(folder))
        write(folder)

    final = root / f"step-{state.steps_done}"
    if not ranks.is_rank0:
        folder: Path | None = ranks.broadcast()
        if folder is not None:
            write(folder)
        return final
    announced: list[Path] = []
    try:
        write_folder_atomically(final, announce_and_write)
    except BaseException:
        if not announced:
            ranks.broadcast(None)  # release the other ranks: there is no folder to write to
        raise
    for old in checkpoints(root)[:-keep]:
        # rename first: a half-deleted folder must not look like a checkpoint
        deleting = old.with_name(f".deleting-{old.name}")
        old.rename(deleting)
        shutil.rmtree(deleting)
    return final


def load_trainer_state(folder: Path) -> TrainerState:
    """Load the trainer state of a checkpoint.

    Raises:
        UserError: it was written by an incompatible version.
    """
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    known = {f.name for f in fields(TrainerState)}
    if saved.keys() != known:
        raise UserError(
            f"run.dir: {str(folder)!r} was written by an incompatible version of Cohort "
            f"(different fields: {', '.join(sorted(saved.keys() ^ known))}); resume with that version, or use a new "
            f"run.dir"
        )
    return TrainerState(**saved)


def load_engine_state(folder: Path, state: dict[str, Any], ranks: Ranks = SINGLE_PROCESS) -> None:
    """Load the engine's state into `state`, which has the structure of what was saved. Each rank reads its shards.

    Raises:
        UserError: the state is another optimizer's, or the files cannot be read. (With a manifest, damage is found
            before.)
    """
    try:
        with _checkpointing():
            _check_optimizer(folder, state)
            dcp.load(
                state,
                checkpoint_id=folder / _OPTIMIZER,
                no_dist=ranks.world_size == 1,
                process_group=ranks.control_group,
            )
    except (AssertionError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"run.dir: {str(folder)!r} is damaged: cannot read the optimizer state ({error}); move the folder away "
            f"to resume from the previous checkpoint"
        ) from error


def _check_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the state of the user's optimizer, if there is one, and that all of it is loaded.

    Raises:
        UserError: it has another one's, or some that is not created in the first step.
    """
    reader, found = dcp.FileSystemReader(folder / _OPTIMIZER), {"made_by": _BUILTIN}
    saved = reader.read_metadata().state_dict_metadata
    if "optimizer.custom.made_by" in saved:
        dcp.load({"optimizer": {"custom": found}}, storage_reader=reader, no_dist=True)
    now = state.get("optimizer", {}).get("custom", {}).get("made_by", _BUILTIN)
    if found["made_by"] != now:
        raise UserError(
            f"optim: {str(folder)!r} has the state of {found['made_by']}, and this run has {now}; resume with the same "
            f"optimizer, or start a new run"
        )
    if now == _BUILTIN:
        return
    loaded = flatten_state_dict(dict(state))[0]
    if lost := [key for key in saved if key.startswith("optimizer.state.") and key not in loaded]:
        raise UserError(
            f"optim: {str(folder)!r} has state that the optimizer creates only after its first step, so the run cannot "
            f"go on exactly: {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''}; create all state in the first "
            f"step, and start a new run"
        )


def _save_engine_state(state: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
    with _checkpointing():
        dcp.save(
            dict(state),
            storage_writer=_Writer(folder),
            no_dist=ranks.world_size == 1,
            process_group=ranks.control_group,
        )


class _Writer(dcp.FileSystemWriter):
    """A writer that reports the root cause of a failed write, such as a full disk or an interrupt.

    `torch.save` raises an error about file positions on top of it.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data of `plan`."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ or error from None


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Re-raise the original error of a failed rank on every rank.

    Torch's wrapper of it is not an `Exception`. Also silence the warning that torch.distributed is not initialized:
    with one process that is intended.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as wrapper:
            error, _ = wrapper.failures[min(wrapper.failures)]
            raise error from wrapper


def _flush_own_files(folder: Path, weights: Mapping[Path, int], ranks: Ranks) -> Checksums:
    """Flush the files of a checkpoint that this rank has written, and return their checksums.

    Args:
        folder: of the checkpoint.
        weights: the rank that wrote each file of weights.
        ranks: all of them call this.
    """
    files = []
    for path in folder.rglob("*"):
        shard = re.match(r"__(\d+)_", path.name)  # files of torch.distributed.checkpoint
        if path.is_file() and ranks.rank == (int(shard[1]) if shard else weights.get(path, 0)):  # rank 0: all others
            files.append(path)
    with checksums_in_background(folder, files) as checksums:
        for file in files:
            flush(file)
    return checksums()
