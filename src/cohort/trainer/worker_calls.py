"""Worker group calls that split their arguments over ranks or merge the results."""

from collections.abc import Sequence, Set
from dataclasses import replace

from cohort.batch import TrainBatch
from cohort.engine import TrainEngine
from cohort.packing import pack
from cohort.records import FloatArray, ForwardOnlyField, ForwardOnlyOutputs, TrainSequence, expand_to_mask
from cohort.rollout import Completion, SampleRequest, split_requests
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


def sample(workers: WorkerGroup[Worker], requests: Sequence[SampleRequest]) -> list[Completion]:
    """Sample completions in equal shares on all ranks. All requests have the same purpose."""
    shares = split_requests(requests, workers.ranks.dp_size)
    sampled = workers.scatter(Worker.sample, shares, requests[0].keys[0].purpose)
    return [completion for share in sampled for completion in share]


def pack_batches(
    engine: TrainEngine, sequences: Sequence[TrainSequence], *, sequence_level: bool = False
) -> tuple[TrainBatch, ...]:
    """Pack a step's sequences into one batch per rank, under the engine's current token budget.

    Args:
        engine: gives the token budget and the layout.
        sequences: sequences of a step.
        sequence_level: keep each trajectory's sequences in one micro-batch, for losses that sum over a trajectory.
    """
    return pack(
        sequences,
        micro_batch_tokens=engine.budget.tokens,
        dp_size=engine.ranks.dp_size,
        share_prompts=engine.policy.shares_prompts,
        padded=engine.policy.layout == "padded",
        sequence_level=sequence_level,
    )


def run_forward_only(
    workers: WorkerGroup[Worker], sequences: Sequence[TrainSequence], wanted: Set[ForwardOnlyField]
) -> ForwardOnlyOutputs:
    """Compute the `wanted` logprobs, entropies and values of a step's sequences, without gradient, on all ranks."""
    if not wanted:
        return ForwardOnlyOutputs()
    shards = [batch.sequences for batch in pack_batches(workers.local.engine, sequences)]
    parts = workers.scatter(Worker.forward_only, shards, wanted)
    return ForwardOnlyOutputs(**{name: {i: x for part in parts for i, x in part[name].items()} for name in wanted})


def with_first_pass(
    workers: WorkerGroup[Worker], sequences: Sequence[TrainSequence], outputs: ForwardOnlyOutputs
) -> ForwardOnlyOutputs:
    """Complete a step's forward-only outputs with what its first pass computed for the sequences trained on."""
    masks = {s.index: s.loss_mask for s in sequences}
    found: dict[ForwardOnlyField, dict[int, FloatArray]] = {}
    for part in workers.call(Worker.first_pass_outputs):
        for name, by_sequence in part.items():
            found.setdefault(name, {}).update({i: expand_to_mask(masks[i], x) for i, x in by_sequence.items()})
    return replace(outputs, **{name: {**values, **getattr(outputs, name)} for name, values in found.items()})


def keep_ranks_alive(workers: WorkerGroup[Worker]) -> None:
    """Renew the other ranks' deadlines if they are due. Call this regularly while rank 0 waits."""
    if workers.ranks.world_size > 1 and workers.seconds_idle() > workers.ranks.timeout_s / 4:
        workers.call(Worker.ping)
