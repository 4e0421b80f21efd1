"""Checkpoints that are either whole or not there.

A checkpoint is a model folder (weights, config, tokenizer) with the trainer's state beside it. It is written under a
temporary name, flushed to disk, and renamed: a kill at any instant leaves the last whole one.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cohort.errors import TrainingError
from cohort.policy import Policy, quiet_transformers

_STATE, _OPTIMIZER = "trainer_state.json", "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a run must remember besides weights and optimizer."""

    steps_done: int
    data: Mapping[str, Any]  # the prompt stream's state
    num_tokens: int  # prompt and completion tokens trained on so far
    seconds: float  # wall time so far


def save_model(policy: Policy, tokenizer: Any, folder: Path) -> None:
    """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included."""
    with quiet_transformers():
        policy.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def save_checkpoint(
    root: Path, *, policy: Policy, tokenizer: Any, engine_state: Mapping[str, Any], state: TrainerState, keep: int
) -> Path:
    """Write `root/step-N` and delete all but the last `keep` checkpoints.

    Raises:
        TrainingError: the disk is full; earlier checkpoints are untouched.
    """

    def write(folder: Path) -> None:
        save_model(policy, tokenizer, folder)
        _save_engine_state(engine_state, folder / _OPTIMIZER)
        (folder / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")

    final = root / f"step-{state.steps_done}"
    write_folder_atomically(final, write)
    for old in checkpoints(root)[:-keep]:
        # renamed first: a half-deleted folder must not look like a checkpoint
        doomed = old.with_name(f".deleting-{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def load_trainer_state(folder: Path) -> TrainerState:
    """The state saved with a checkpoint."""
    return TrainerState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))


def load_engine_state(folder: Path) -> dict[str, Any]:
    """The engine's state saved with a checkpoint, on the CPU."""
    return torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints under `root`, oldest first."""
    found = [p for p in root.glob("step-*") if p.name.removeprefix("step-").isdecimal() and (p / _STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def remove_leftovers(root: Path) -> None:
    """Delete what a killed run left half-written or half-deleted."""
    for leftover in (*root.glob(".writing-*"), *root.glob(".deleting-*")):
        shutil.rmtree(leftover)
    for leftover in root.glob(".*.partial"):
        leftover.unlink()


def write_folder_atomically(final: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder beside `final`, flush it to disk and rename it to `final`.

    Raises:
        TrainingError: the disk is full; nothing is left behind.
    """
    temporary = final.with_name(f".writing-{final.name}")
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
    """Turn "no space left" on writing `path` into an error that says what to do."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # safetensors and tokenizers have error types of their own
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and not any(text in str(error) for text in ("No space left", "Disk quota exceeded")):
            raise
        raise TrainingError(
            f"{path}: no space left on the disk. Nothing written earlier is lost: free some space and run the same "
            f"command again to go on from the last checkpoint"
        ) from error


def _save_engine_state(state: Mapping[str, Any], path: Path) -> None:
    # Given a path, torch does not say that the disk is full. Given a file, it does, or it complains about positions in
    # the file and hides behind that what stopped the write: a full disk, or an interrupt.
    with path.open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            raise error.__context__ or error from None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
