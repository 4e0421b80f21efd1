"""The checkpoint that a run goes on from: the newest whole one, which all ranks look for together."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.checkpoint import TrainerState, load_trainer_state
from cohort.distributed import Ranks
from cohort.errors import UserError
from cohort.run_files import DAMAGED, Checksums, checkpoints, find_damage, read_manifest, split_by_size

_MANY_BYTES = 4_000_000_000  # take some seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOrder:
    """Files of a checkpoint that the ranks read, each its share, to compare them with the manifest."""

    folder: Path
    shares: Sequence[Checksums]  # by rank

    def carry_out(self, ranks: Ranks) -> list[list[str]] | None:
        """What is wrong, by rank, on rank 0; None elsewhere. Every rank calls this."""
        return ranks.gather(find_damage(self.folder, self.shares[ranks.rank]))


def find_checkpoint(root: Path, ranks: Ranks, note: Callable[[str], None]) -> tuple[Path | None, TrainerState | None]:
    """The newest whole checkpoint and its state; both None where there is no checkpoint. Rank 0 decides.

    Damaged ones are told and set aside as `damaged-step-N`. The other ranks carry out what rank 0 commands.

    Args:
        root: folder of the checkpoints.
        ranks: of the run.
        note: told what a person should know.

    Raises:
        UserError: all are damaged, or the newest whole one is another version's; none is set aside.
    """
    damaged: list[tuple[Path, list[str]]] = []
    found: Path | None = None
    state: TrainerState | None = None
    for path in reversed(checkpoints(root)):
        wrong = _damage(path, ranks, note)
        if not wrong:
            try:
                found, state = path, load_trainer_state(path)
                break
            except (OSError, json.JSONDecodeError, AttributeError, TypeError) as error:  # where there is no manifest
                wrong = [f"trainer_state.json cannot be read: {error}"]
        damaged.append((path, wrong))
    stories = [f"checkpoint {path.name} is damaged: {'; '.join(wrong[:3])}" for path, wrong in damaged]
    if damaged and found is None:
        listed = "\n".join(stories)
        raise UserError(
            f"run.dir: {str(root.parent)!r} has no whole checkpoint to go on from.\n{listed}\nGive a new run.dir to "
            f"start anew, or put back the files"
        )
    for (path, _), story in zip(damaged, stories, strict=True):
        aside = _set_aside(path)
        assert found is not None
        note(f"{story}. It is kept as {aside.name}, and the run goes on from {found.name}")
    return found, state


def _damage(path: Path, ranks: Ranks, note: Callable[[str], None]) -> list[str]:
    """What is wrong with a checkpoint."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    if manifest is None:
        note(f"checkpoint {path.name} has no manifest, as those of earlier versions: its files are not checked")
        return []
    order = VerifyOrder(folder=path, shares=split_by_size(manifest, ranks.world_size))
    if (num_bytes := sum(size for size, _ in manifest.values())) >= _MANY_BYTES:
        note(f"verifying {path.name} ({num_bytes / 1e9:.0f} GB)")
    ranks.command(order)
    wrong = order.carry_out(ranks)
    assert wrong is not None, "rank 0 gathers"
    return [story for of_rank in wrong for story in of_rank]


def _set_aside(path: Path) -> Path:
    aside, number = path.with_name(f"{DAMAGED}{path.name}"), 2
    while aside.exists():
        aside, number = path.with_name(f"{DAMAGED}{path.name}-{number}"), number + 1
    return path.rename(aside)
