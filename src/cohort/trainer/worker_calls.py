"""Calls of all workers whose shards or results rank 0 has to split or merge."""

from collections.abc import Sequence, Set

from cohort.batch import TrainBatch
from cohort.engine import TrainEngine
from cohort.packing import pack
from cohort.records import Estimate, Estimates, TrainSequence
from cohort.rollout import Sampled, SampleRequest, merge_shares, split_requests
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


def sample(workers: WorkerGroup[Worker], requests: Sequence[SampleRequest]) -> list[tuple[Sampled, ...]]:
    """Sample the completions of requests that have one purpose, in equal shares on all ranks."""
    shares = split_requests(requests, workers.ranks.dp_size)
    return merge_shares(requests, workers.scatter(Worker.sample, shares, requests[0].keys[0].purpose))


def pack_batches(
    engine: TrainEngine, sequences: Sequence[TrainSequence], *, sequence_level: bool = False
) -> tuple[TrainBatch, ...]:
    """Pack a step's sequences into one batch per rank, under the engine's current token budget.

    Args:
        engine: that computes them.
        sequences: of a step.
        sequence_level: whether the loss sums over a trajectory. Then its sequences stay in one micro-batch.
    """
    return pack(
        sequences,
        micro_batch_tokens=engine.budget.tokens,
        world_size=engine.ranks.dp_size,
        share_prompts=engine.policy.shares_prompts,
        padded=engine.policy.layout == "padded",
        sequence_level=sequence_level,
    )


def compute_estimates(
    workers: WorkerGroup[Worker], sequences: Sequence[TrainSequence], wanted: Set[Estimate]
) -> Estimates:
    """Compute a step's logprobs, entropies and values before it is trained on; only those that are `wanted`."""
    if not wanted:
        return Estimates()
    shards = [batch.sequences for batch in pack_batches(workers.local.engine, sequences)]
    parts = workers.scatter(Worker.estimate, shards, wanted)
    return Estimates(**{name: {i: x for part in parts for i, x in part[name].items()} for name in wanted})


def keep_waiting(workers: WorkerGroup[Worker]) -> None:
    """Renew the other ranks' deadlines. To be called from time to time while rank 0 waits for something else."""
    if workers.ranks.world_size > 1 and workers.seconds_idle() > workers.ranks.timeout_s / 4:
        workers.call(Worker.ping)
