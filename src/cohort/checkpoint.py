"""Checkpoints that are either whole or not there.

A checkpoint is a model folder (weights, config, tokenizer) with the trainer's state beside it: `trainer_state.json`,
the critic's folder where there is one, and the engine's state (the optimizers'; the weights of a reference that
changes) as torch.distributed.checkpoint writes it, every rank its shards, so that any number of ranks can read it. It
is written under a temporary name, flushed to disk, and renamed: a kill at any instant leaves the last whole one.
"""

import errno
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cohort.distributed import ALONE, Ranks
from cohort.errors import TrainingError, UserError
from cohort.run_files import STATE, Checksums, checkpoints, checksums_of, write_manifest

if TYPE_CHECKING:  # what only looks at checkpoints should not wait for transformers
    from cohort.policy import Critic, Policy, Saving

_OPTIMIZER = "optimizer"
_DISK_ERRORS = {
    errno.ENOSPC: ("no space left on the disk", "free some space"),
    errno.EDQUOT: ("no space left on the disk", "free some space"),
    errno.EFBIG: ("the file is larger than this process may write", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system has become read-only", "make it writable"),
    errno.EACCES: ("there is no permission to write here any more", "give it back"),
    errno.ENOENT: ("its folder is gone", "put it back"),
    errno.EIO: ("the disk does not take it (input/output error)", "look at the disk"),
    errno.ESTALE: ("the network file system has lost it", "mount it again"),
}
CRITIC = "critic"  # its folder in a checkpoint's
_WRITING = ".writing-"  # before the name of a folder that is not whole yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a run must remember besides weights and optimizer."""

    steps_done: int
    data: Mapping[str, Any]  # the prompt stream's state
    pending: Sequence[Mapping[str, int]]  # prompts that were taken from it and not trained on yet, see `Prefetcher`
    num_tokens: int  # prompt and completion tokens trained on so far
    seconds: float  # wall time so far
    micro_batch_tokens: int  # the budget as it was found, or halved when memory ran out
    micro_batch_tokens_wanted: int | Literal["auto"]  # what the configuration said
    processes: int  # that it was found with
    control: Mapping[str, Any]  # of the loss's coefficients, see `Control`


def save_model(
    policy: "Policy", tokenizer: Any, folder: Path, ranks: Ranks = ALONE, saving: "Saving | None" = None
) -> None:
    """Write a model folder, or an adapter's, as `policy.save_policy` does."""
    from cohort.policy import save_policy

    save_policy(policy, tokenizer, folder, ranks, saving)


def save_checkpoint(
    root: Path,
    *,
    policy: "Policy",
    critic: "Critic | None" = None,
    tokenizer: Any,
    engine_state: Mapping[str, Any],
    state: TrainerState,
    keep: int,
    ranks: Ranks = ALONE,
    saving: "Saving | None" = None,
) -> Path:
    """Write `root/step-N` and delete all but the last `keep` checkpoints. Every rank takes part.

    Raises:
        TrainingError: the disk is full; earlier checkpoints are untouched.
    """

    def write(folder: Path) -> None:
        with disk_errors(folder):
            _save_engine_state(engine_state, folder / _OPTIMIZER, ranks)
            save_model(policy, tokenizer, folder, ranks, saving)
            if critic is not None:
                save_model(critic, tokenizer, folder / CRITIC, ranks, saving)
            if ranks.is_first:
                (folder / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            checksums = ranks.gather(_flushed(folder, ranks))
            if checksums is not None:
                write_manifest(folder, {name: found for own in checksums for name, found in own.items()})

    def write_first(folder: Path) -> None:
        others_know.append(ranks.broadcast(folder))
        write(folder)

    final = root / f"step-{state.steps_done}"
    if not ranks.is_first:
        told: Path | None = ranks.broadcast()
        if told is not None:
            write(told)
        return final
    others_know: list[Path] = []
    try:
        write_folder_atomically(final, write_first)
    except BaseException:
        if not others_know:
            ranks.broadcast(None)  # there is nowhere to write to, and they are waiting to be told where
        raise
    for old in checkpoints(root)[:-keep]:
        # renamed first: a half-deleted folder must not look like a checkpoint
        doomed = old.with_name(f".deleting-{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def load_trainer_state(folder: Path) -> TrainerState:
    """The state saved with a checkpoint.

    Raises:
        UserError: it was written by another version.
    """
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    known = {f.name for f in fields(TrainerState)}
    if saved.keys() != known:
        raise UserError(
            f"run.dir: {str(folder)!r} was written by another version of Cohort "
            f"(it differs in {', '.join(sorted(saved.keys() ^ known))}); go on with that version, or give a new run.dir"
        )
    return TrainerState(**saved)


def load_engine_state(folder: Path, state: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Fill `state`, of the same structure as what was saved, from a checkpoint. Every rank reads its shards.

    Raises:
        UserError: its files cannot be read. Where the checkpoint has a manifest that was found out before.
    """
    try:
        with _checkpointing():
            dcp.load(
                state,
                checkpoint_id=folder / _OPTIMIZER,
                no_dist=ranks.world_size == 1,
                process_group=ranks.control_group,
            )
    except (AssertionError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"run.dir: {str(folder)!r} is damaged: the optimizer's state cannot be read ({error}). Move it elsewhere "
            f"to go on from the checkpoint before it"
        ) from error


def remove_leftovers(root: Path) -> None:
    """Delete what a killed run left half-written or half-deleted."""
    for leftover in (*root.glob(f"{_WRITING}*"), *root.glob(".deleting-*")):
        shutil.rmtree(leftover)
    for leftover in root.glob(".*.partial"):
        leftover.unlink()


def write_folder_atomically(final: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder beside `final`, flush it to disk and rename it to `final`.

    Raises:
        TrainingError: the disk is full; nothing is left behind.
    """
    temporary = final.with_name(f"{_WRITING}{final.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        with disk_errors(final):
            temporary.mkdir(parents=True)
            write(temporary)
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _flush(final.parent)


@contextmanager
def write_file_atomically(final: Path) -> Iterator[Path]:
    """Give a path to write to; what is there afterwards is flushed to disk and takes the place of `final`.

    Raises:
        TrainingError: the disk is full; `final` is as before.
    """
    partial = final.with_name(f".{final.name}.partial")
    try:
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            _flush(partial)
            partial.replace(final)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk that does not take `path`, or what becomes `path`, into an error that says what to do."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        # safetensors, tokenizers and torch have error types of their own
        said = (n for n in _DISK_ERRORS if os.strerror(n) in str(error))
        number = getattr(error, "errno", None) or next(said, None)
        final = path.with_name(path.name.removeprefix(_WRITING))
        if number not in _DISK_ERRORS or (number == errno.ENOENT and final.parent.exists()):
            raise
        what, advice = _DISK_ERRORS[number]
        raise TrainingError(
            f"{final}: {what}. Nothing written earlier is lost: {advice} and run the same command again to go on from "
            f"the last checkpoint"
        ) from error


def _save_engine_state(state: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
    with _checkpointing():
        dcp.save(
            dict(state),
            storage_writer=_Writer(folder),
            no_dist=ranks.world_size == 1,
            process_group=ranks.control_group,
        )


class _Writer(dcp.FileSystemWriter):
    """Tells the other ranks what really stopped it, a full disk or an interrupt.

    On its way out of a failed write, `torch.save` complains about positions in the file, and the cause is behind that.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan says."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ or error from None


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Raise what a rank raised, the same on every rank, and not torch's wrapper around it, which is no `Exception`.

    One process is a choice here and no mistake to warn of.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as wrapper:
            error, _ = wrapper.failures[min(wrapper.failures)]
            raise error from wrapper


def _flushed(folder: Path, ranks: Ranks) -> Checksums:
    """The checksums of the files in a checkpoint's folder that this rank has written, which are on the disk then."""
    others = re.compile(rf"__(?!{ranks.rank}_)\d+_.*")  # as torch.distributed.checkpoint names the ranks' files
    own = re.compile(rf"__{ranks.rank}_.*")
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and (not others.fullmatch(path.name) if ranks.is_first else own.fullmatch(path.name))
    ]
    with checksums_of(folder, files) as checksums:
        for file in files:
            _flush(file)
    return checksums()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
