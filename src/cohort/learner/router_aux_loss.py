"""Router auxiliary (load-balancing) loss of mixture-of-experts models, over all tokens of an optimizer step.

    E * sum_e f_e P_e   (arXiv:2101.03961, equation 4, over all layers together as in transformers)

f_e is the number of times that expert e is chosen, per position; P_e is its mean probability. Both are means over the
whole step: a sum of products per micro-batch would depend on the split. P is a sum over positions and has the gradient.
f has none and must be known first, so a forward-only pass counts it. Padding does not count. A prompt shared by
completions counts once for each of them, as if each were computed separately.

N positions of a router, E experts, R routers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cohort.models import Policy, RouterLogits
from cohort.packing.batch import MicroBatch
from cohort.ranks.collectives import Ranks
from cohort.records import TrainSequence

AUX_LOSS, LOAD = "moe/aux_loss", "moe/expert_load"


class RouterAuxLoss:
    """Router auxiliary loss of a policy."""

    def __init__(self, policy: Policy, coefficient: float):
        """Attach to the routers of a policy.

        Args:
            policy: the policy to train.
            coefficient: weight of the loss.
        """
        config = policy.model.config.get_text_config()
        self._policy = policy
        self._coefficient = coefficient
        self._logits = RouterLogits(policy.model)
        self._num_chosen: int = config.num_experts_per_tok
        self.begin_count()

    def begin_count(self) -> None:
        """Clear all counts, before the counting passes over a step."""
        self._choices: dict[int, Tensor] = {}  # router -> [E]
        self._probabilities: dict[int, Tensor] = {}  # router -> [E], sums over positions
        self._factors: Tensor | None = None  # [E], factor of each expert's probabilities in the loss

    @contextmanager
    def count_pass(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Count the routers' choices in the forward pass inside, unless it fails."""
        counts = self._policy.sequences_per_position(micro_batch).double()
        choices: dict[int, Tensor] = {}
        probabilities: dict[int, Tensor] = {}

        def count(router: int, logits: Tensor) -> None:
            p = _probabilities(logits)
            chosen = p.topk(self._num_chosen, dim=-1).indices.flatten()
            weights = counts.repeat_interleave(self._num_chosen)
            choices[router] = counts.new_zeros(logits.shape[-1]).index_add_(0, chosen, weights)
            probabilities[router] = counts @ p.double()

        with self._logits.collect_into(count):
            yield
        for total, new in ((self._choices, choices), (self._probabilities, probabilities)):
            for router, sums in new.items():
                total[router] = total[router] + sums if router in total else sums

    def finish_count(self, sequences: Sequence[TrainSequence], ranks: Ranks) -> dict[str, float]:
        """Reduce the counts of a step, so that `collect` computes its loss. Every rank calls this.

        Args:
            sequences: sequences of this rank.
            ranks: ranks of the run.

        Returns:
            Metrics: the auxiliary loss and the experts' load.
        """
        num_inputs = ranks.all_reduce_sum([float(sum(len(s.token_ids) - 1 for s in sequences))])[0]
        if num_inputs == 0:
            return {}
        choices_RE = self._reduce(self._choices, ranks)
        mean_E = self._reduce(self._probabilities, ranks).sum(0)
        num_routers, num_experts = choices_RE.shape
        num_positions = num_inputs * num_routers
        self._factors = num_experts * choices_RE.sum(0) / num_positions**2
        load_RE = choices_RE * num_experts / (num_inputs * self._num_chosen)
        return {
            AUX_LOSS: (self._factors * mean_E).sum().item(),
            f"{LOAD}/max": load_RE.max().item(),
            f"{LOAD}/min": load_RE.min().item(),
        }

    def _reduce(self, sums: dict[int, Tensor], ranks: Ranks) -> Tensor:
        """Add sums over all ranks, [R, E]."""
        own = torch.stack([sums[router] for router in sorted(sums)])
        total = torch.tensor(ranks.all_reduce_sum(own.flatten().tolist()), dtype=own.dtype, device=own.device)
        return total.view_as(own)

    @contextmanager
    def collect(self, micro_batch: MicroBatch) -> Iterator[list[Tensor]]:
        """Collect the loss of the forward pass inside: on exit the list has one tensor [], with gradient."""
        logits_per_router: list[Tensor] = []
        losses: list[Tensor] = []
        with self._logits.collect_into(lambda _, logits: logits_per_router.append(logits)):
            yield losses
        counts = self._policy.sequences_per_position(micro_batch)
        sums = [counts.to(p.dtype) @ p for p in map(_probabilities, logits_per_router)]
        total = torch.stack(sums).sum(0)
        factors = torch.zeros_like(total) if self._factors is None else self._factors.to(total.dtype)
        losses.append(self._coefficient * (factors * total).sum())


def _probabilities(logits: Tensor) -> Tensor:
    """Probabilities of the experts [N, E], in float32 or wider."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
