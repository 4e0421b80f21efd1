"""What ranks do together in the tests of saving, and of loading what was saved."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.config import ModelConfig
from cohort.models import Policy, SaveOptions, load_tokenizer, save_policy, stream_weights
from cohort.models import saving as export_weights
from cohort.models.fsdp import local_rows
from cohort.models.loading.meta_device import named_saved_tensors
from cohort.ranks.collectives import Ranks
from rank_loading import counted_load


class Gathered:
    """Counts the bytes of the gathered tensors that are still there, and the most there ever were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._gather = export_weights._full_tensor
        patch.setattr("cohort.models.saving._full_tensor", self.gather)

    def gather(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        whole = self._gather(tensor, dtype)
        if whole is not tensor and whole.data_ptr() != local_rows(tensor)[0].data_ptr():
            self.now += whole.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(whole.untyped_storage(), self.gone, whole.nbytes)
        return whole

    def gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


def run_saving(ranks: Ranks, folder: str, path: str) -> dict[str, Any]:
    """A model loaded and saved: what each rank has read, what was gathered at a time, and what was loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.models.loading.load_model.load_with_transformers", None)  # nobody may read it whole
        policy, num_bytes = counted_load(ranks, path, "float32")
        gathered = Gathered(patch)
        save(policy, path, Path(folder) / Path(path).name, ranks, 10_000)
    return {
        "num_bytes": ranks.gather(num_bytes),
        "own_bytes": ranks.gather(sum(local_rows(t)[0].nbytes for _, t in named_saved_tensors(policy.model))),
        "most_gathered": ranks.gather(gathered.most),
        "left": gathered.now,
        "weights": dict(stream_weights(policy)),
    }


def run_saving_fails(ranks: Ranks, folder: str, path: str) -> dict[str, Any]:
    """The disk is full in the third file; then there is room; then rank 1 does not see the folder."""
    policy, _ = counted_load(ranks, path, "float32")
    real = Path.open

    def open_on_a_full_disk(self: Path, *args: Any, **kwargs: Any) -> Any:
        full = self.name.startswith("model-00003-of-")
        return real(Path("/dev/full") if full else self, *args, **kwargs)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_on_a_full_disk)
        try:
            save(policy, path, Path(folder) / "full", ranks, 20_000)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    files = {"room": save(policy, path, Path(folder) / "room", ranks, 20_000)}
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(Path, "exists", lambda *_: False)
        files["apart"] = save(policy, path, Path(folder) / "apart", ranks, 20_000)
    writers = {name: sorted(set(by_file.values())) for name, by_file in files.items()}
    third = next(rank for file, rank in files["room"].items() if file.name.startswith("model-00003-of-"))
    weights = dict(stream_weights(policy))
    return {"said": ranks.gather(said), "third": third, "writers": writers, "weights": weights}


def save(policy: Policy, path: str, folder: Path, ranks: Ranks, shard_bytes: int) -> dict[Path, int]:
    tokenizer = load_tokenizer(ModelConfig(path=path)) if ranks.is_rank0 else None
    return save_policy(
        policy, tokenizer, folder, ranks, SaveOptions(max_shard_bytes=shard_bytes, min_shard_bytes=shard_bytes)
    )


JOBS = {"saving": run_saving, "saving_fails": run_saving_fails}
