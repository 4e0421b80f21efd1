"""Repack a step on all ranks under another token budget. C loss tokens of one sequence."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cohort.batch import TrainBatch
from cohort.distributed import Ranks
from cohort.models import Policy
from cohort.packing import pack


def repack(
    batch: TrainBatch,
    tensors: Sequence[Mapping[int, Tensor]],
    *,
    policy: Policy,
    ranks: Ranks,
    micro_batch_tokens: int,
) -> tuple[TrainBatch, tuple[dict[int, Tensor], ...]]:
    """Repack a step under another token budget, as if it had been packed under it from the start.

    Sequences may move to other ranks, because each budget balances ranks anew. Their tensors move with them. Every rank
    calls this.

    Args:
        batch: this rank's batch.
        tensors: mappings of sequence index -> [C], which may lack some sequences.
        policy: computes the sequences.
        ranks: all ranks.
        micro_batch_tokens: the new budget.

    Returns:
        This rank's batch, and the tensors of its sequences on the policy's device.
    """
    own = [{n: values.to("cpu", copy=True) for n, values in mapping.items()} for mapping in tensors]
    per_dp_rank = None
    if (gathered := ranks.gather((batch.sequences, own))) is not None:
        leaders = [gathered[rank] for rank in ranks.dp_leaders]
        sequences = sorted((s for some, _ in leaders for s in some), key=lambda s: s.index)
        batches = pack(
            sequences,
            micro_batch_tokens=micro_batch_tokens,
            dp_size=ranks.dp_size,
            share_prompts=policy.shares_prompts,
            padded=policy.layout == "padded",
            sequence_level=batch.sequence_level,
        )
        merged = [{n: x for _, mappings in leaders for n, x in mappings[i].items()} for i in range(len(tensors))]
        per_dp_rank = [
            (new, [{s.index: values[s.index] for s in new.sequences if s.index in values} for values in merged])
            for new in batches
        ]
    own_batch, own = ranks.scatter(per_dp_rank)
    return own_batch, tuple({n: values.to(policy.device) for n, values in mapping.items()} for mapping in own)
