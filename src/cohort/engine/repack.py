"""Pack a step that ranks have already, under another budget."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cohort.batch import TrainBatch
from cohort.distributed import Ranks
from cohort.models import Policy
from cohort.packing import pack

Known = dict[int, Tensor]  # sequence index -> [C]


def packed_again(
    batch: TrainBatch, known: Sequence[Mapping[int, Tensor]], *, policy: Policy, ranks: Ranks, micro_batch_tokens: int
) -> tuple[TrainBatch, tuple[Known, ...]]:
    """Repack a step under another budget, as if it had been packed so from the start. Every rank calls this.

    A sequence may come to another rank, as ranks are balanced under each budget. What is known of it goes with it.

    Args:
        batch: this rank's.
        known: of its sequences.
        policy: that computes them.
        ranks: all of them.
        micro_batch_tokens: the budget.

    Returns:
        this rank's batch, and what is known of its sequences, on the policy's device.
    """
    own = [{n: values.to("cpu", copy=True) for n, values in some.items()} for some in known]
    shares = None
    if (of_ranks := ranks.gather((batch.sequences, own))) is not None:
        gathered = [of_ranks[rank] for rank in ranks.dp_leaders]
        sequences = sorted((s for some, _ in gathered for s in some), key=lambda s: s.index)
        batches = pack(
            sequences,
            micro_batch_tokens=micro_batch_tokens,
            world_size=ranks.dp_size,
            share_prompts=policy.shares_prompts,
            padded=policy.layout == "padded",
            sequence_level=batch.sequence_level,
        )
        everything = [{n: x for _, of in gathered for n, x in of[i].items()} for i in range(len(known))]
        shares = [
            (packed, [{s.index: of[s.index] for s in packed.sequences if s.index in of} for of in everything])
            for packed in batches
        ]
    mine, own = ranks.scatter(shares)
    return mine, tuple({n: values.to(policy.device) for n, values in some.items()} for some in own)
