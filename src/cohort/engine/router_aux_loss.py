"""The loss that keeps the experts of a mixture evenly used, over all tokens of an optimizer step.

    E * sum_e f_e P_e   (arXiv:2101.03961, equation 4, of all layers together as in transformers)

f_e is the number of choices of expert e per position, P_e its mean probability. The product is of two means over the
whole step, so that adding up the products of micro-batches would give another number for every split. P has the
gradient and is a sum over positions; f has none, and has to be known before: a forward pass counts it. Padding counts
nothing, and a prompt that completions share counts once for each of them, as if each were computed by itself.

N positions that a router is given, E experts, R routers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cohort.batch import MicroBatch
from cohort.distributed import Ranks
from cohort.models import Policy, RouterLogits
from cohort.records import TrainSequence

AUX_LOSS, LOAD = "moe/aux_loss", "moe/expert_load"


class Balance:
    """The auxiliary loss of one step after another."""

    def __init__(self, policy: Policy, coefficient: float):
        """Of a policy with routers.

        Args:
            policy: that is trained.
            coefficient: of the loss.
        """
        config = policy.model.config.get_text_config()
        self._policy = policy
        self._coefficient = coefficient
        self._logits = RouterLogits(policy.model)
        self._num_chosen: int = config.num_experts_per_tok
        self._begin()

    def _begin(self) -> None:
        """Nothing is counted yet."""
        self._choices: dict[int, Tensor] = {}  # router -> [E]
        self._probabilities: dict[int, Tensor] = {}  # router -> [E], sums over positions
        self._factors: Tensor | None = None  # [E], of the probabilities' sums in the loss

    @contextmanager
    def counted(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Count what the routers choose in a forward pass inside, unless that fails."""
        counts = self._policy.computed_counts(micro_batch).double()
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
        for mine, new in ((self._choices, choices), (self._probabilities, probabilities)):
            for router, sums in new.items():
                mine[router] = mine[router] + sums if router in mine else sums

    @contextmanager
    def counting(self, sequences: Sequence[TrainSequence], ranks: Ranks, metrics: dict[str, float]) -> Iterator[None]:
        """Count inside the passes over a step; afterwards the loss of this step can be computed. Every rank enters.

        Args:
            sequences: of this rank.
            ranks: all of them.
            metrics: takes the auxiliary loss and the experts' loads.
        """
        self._begin()
        yield
        num_inputs = ranks.sums([float(sum(len(s.token_ids) - 1 for s in sequences))])[0]
        if num_inputs == 0:
            return
        choices_RE = self._over(self._choices, ranks)
        mean = self._over(self._probabilities, ranks).sum(0)
        num_routers, num_experts = choices_RE.shape
        num_positions = num_inputs * num_routers
        self._factors = num_experts * choices_RE.sum(0) / num_positions**2
        metrics[AUX_LOSS] = (self._factors * mean).sum().item()
        load_RE = choices_RE * num_experts / (num_inputs * self._num_chosen)
        metrics[f"{LOAD}/max"], metrics[f"{LOAD}/min"] = load_RE.max().item(), load_RE.min().item()

    def _over(self, sums: dict[int, Tensor], ranks: Ranks) -> Tensor:
        """The sums of all ranks, [R, E]."""
        own = torch.stack([sums[router] for router in sorted(sums)])
        return torch.tensor(ranks.sums(own.flatten().tolist()), dtype=own.dtype, device=own.device).view_as(own)

    @contextmanager
    def of(self, micro_batch: MicroBatch) -> Iterator[list[Tensor]]:
        """The part of the loss of what is computed inside: one tensor [] with its gradient, once that is done."""
        taken: list[Tensor] = []
        losses: list[Tensor] = []
        with self._logits.collect_into(lambda _, logits: taken.append(logits)):
            yield losses
        counts = self._policy.computed_counts(micro_batch)
        sums = [counts.to(p.dtype) @ p for p in map(_probabilities, taken)]
        total = torch.stack(sums).sum(0)
        factors = torch.zeros_like(total) if self._factors is None else self._factors.to(total.dtype)
        losses.append(self._coefficient * (factors * total).sum())


def _probabilities(logits: Tensor) -> Tensor:
    """[N, E], float32 or wider."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
