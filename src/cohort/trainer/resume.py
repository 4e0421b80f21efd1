"""Find the newest intact checkpoint; all ranks verify its checksums."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.checkpoint import TrainerState, load_trainer_state
from cohort.distributed import Ranks
from cohort.errors import UserError
from cohort.run_files import DAMAGED, Checksums, checkpoints, find_damage, read_manifest, split_by_size

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
