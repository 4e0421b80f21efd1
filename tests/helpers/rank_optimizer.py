"""What tests of optimizers run in each rank: jobs by name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cohort.config import Adamw8bitConfig
from cohort.learner.optimizer import Optimizers
from cohort.ranks.collectives import Ranks


def step_in_8_bits_in_turn(ranks: Ranks, first: str) -> dict[str, Any]:
    """One step of a weight of 101 rows, by one rank after the other, so that the second finds what the first left."""
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    before = torch.randn(101, 128, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(128, 101, bias=False)
    model.weight = nn.Parameter(distribute_tensor(before, mesh, [Shard(0)]))
    model.weight.grad = distribute_tensor(before.sign(), mesh, [Shard(0)])
    optimizers = Optimizers(model, Adamw8bitConfig())
    for rank in (int(first), 1 - int(first)):
        if rank == ranks.rank:
            optimizers.step(0.5)
        dist.barrier()
    assert isinstance(model.weight, DTensor)
    rows = [0] * ranks.world_size
    dist.all_gather_object(rows, len(model.weight.to_local()))
    error = (model.weight.full_tensor() - (before - 0.5 * before.sign())).abs().max()
    return {"rows": rows, "largest_error": float(error)}


JOBS = {"step_in_8_bits_in_turn": step_in_8_bits_in_turn}
