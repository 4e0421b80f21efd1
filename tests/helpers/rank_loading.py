"""What ranks do together in the tests of reading and of handing out weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models import Policy
from cohort.models.loading import load_weights
from cohort.models.saving import stream_weights, weight_specs
from cohort.ranks.collectives import Rank0Failed, Ranks
from rank_engine import load

ARRIVE = load_weights._read_tensors  # tests put another one in its place


def counted_load(ranks: Ranks, path: str, dtype: str, *, whole: bool = False) -> tuple[Policy, int]:
    """A policy, and the bytes that this rank has read for its shards; `whole`: as if the files had to be converted."""
    num_bytes = 0

    def count(places: Any, rows: Any) -> None:
        nonlocal num_bytes
        before = bytes_read()
        ARRIVE(places, rows)
        num_bytes = bytes_read() - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.models.loading.load_weights._read_tensors", count)
        if whole:
            patch.setattr("cohort.models.loading.load_model.match_weights", lambda *_: None)
        policy = load(ModelConfig(path=path, dtype=dtype), ranks)
    return policy, num_bytes


def bytes_read() -> int:
    """Of files and sockets, by this process until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


def run_loading(ranks: Ranks, dtype: str, *paths: str) -> dict[str, Any]:
    """Each model loaded in parts and broadcast by rank 0: what differs anywhere."""
    results = {}
    for path in paths:
        (policy, _), (expected, _) = (counted_load(ranks, path, dtype, whole=whole) for whole in (False, True))
        differ = []
        for name, tensor in expected.model.state_dict().items() | dict(expected.model.named_buffers()).items():
            own = dict(policy.model.named_buffers()).get(name, policy.model.state_dict().get(name))
            local = [x.to_local() if hasattr(x, "to_local") else x for x in (own, tensor)]
            if local[0].dtype != local[1].dtype or not torch.equal(*local):
                differ.append(name)
        results[path] = {
            "differ": ranks.gather(differ),
            "same": policy.traits == expected.traits and policy.model.config == expected.model.config,
            "weights": dict(stream_weights(policy)),
        }
    return results


def run_loading_fails(ranks: Ranks, path: str, other: str, bad_rank: int) -> dict[str, Any]:
    """One rank has its own copy of the model, in which a file is cut short between the check and the reading."""
    file = Path(other) / "model.safetensors"

    def cut_and_fill(*how: Any) -> None:
        if ranks.rank == bad_rank:
            os.truncate(file, file.stat().st_size // 2)
        load_weights.load_sharded_weights(*how)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.models.loading.load_model.load_sharded_weights", cut_and_fill)
        try:
            counted_load(ranks, other if ranks.rank == bad_rank else path, "float32")
        except (UserError, Rank0Failed) as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": ranks.gather(said)}


def run_loading_elsewhere(ranks: Ranks, path: str, without: str) -> dict[str, Any]:
    """Only rank 0 sees the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.models.loading.load_model.load_sharded_weights", None)  # nobody reads its own rows
        policy, _ = counted_load(ranks, path if ranks.is_rank0 else without, "float32")
    return {"weights": dict(stream_weights(policy))}


def run_export(ranks: Ranks, *paths: str) -> dict[str, Any]:
    """What each rank streams of each model, and whether it is rank 0's."""
    results = {}
    for path in paths:
        policy, _ = counted_load(ranks, path, "float32")
        streamed = dict(stream_weights(policy, torch.float32))
        first = ranks.broadcast(streamed)
        same = all(torch.equal(first[name], tensor) for name, tensor in streamed.items()) and len(first) == len(
            streamed
        )
        specs = weight_specs(policy, torch.float32)
        results[path] = {"weights": streamed, "specs": specs, "same": ranks.gather(same)}
    return results


JOBS = {
    "loading": run_loading,
    "loading_fails": run_loading_fails,
    "loading_elsewhere": run_loading_elsewhere,
    "export": run_export,
}
