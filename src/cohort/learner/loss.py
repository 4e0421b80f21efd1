"""The loss of a micro-batch, and the metrics of a step.

T loss tokens of a micro-batch, C of one sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cohort.models import Critic, Policy, PrefixState
from cohort.packing.batch import LossInputs, LossOutput, MicroBatch, PolicyLoss, ValueInputs
from cohort.ranks.collectives import Ranks
from cohort.records import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Metrics of one forward_backward over a step's batch. Counts are over all ranks."""

    metrics: Mapping[str, float]
    num_computed_tokens: int  # tokens to compute, without padding
    num_positions: int  # positions computed, padding included
    num_tokens_unshared: int  # tokens to compute if no prompt were shared
    num_prompt_inputs: int  # prompt tokens among `num_computed_tokens`
    attention_pairs: int  # pairs of a token and a token that it attends to, itself included
    num_micro_batches: int  # per rank, empty ones included
    num_out_of_memory: int  # micro-batches that did not fit


COUNTS = tuple(f.name for f in fields(TrainResult) if f.name not in ("metrics", "num_micro_batches"))


class StepMetrics:
    """Sums, maxima and counts over a step's micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to some of `COUNTS`."""
        for name, count in counts.items():
            self._counts[name] += count

    def add(self, sums: Mapping[str, Tensor], *, maxima: Mapping[str, Tensor]) -> None:
        """Add the metrics of a micro-batch.

        Args:
            sums: name -> sum over its loss tokens; `loss` is a weighted sum.
            maxima: name -> maximum over its loss tokens, at least 0.
        """
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def reduce(self, ranks: Ranks, *, num_tokens: int) -> tuple[dict[str, float], dict[str, int]]:
        """Reduce over all ranks.

        Args:
            ranks: all ranks call this.
            num_tokens: loss tokens of the step, over all ranks.

        Returns:
            Metrics as means over the step's tokens, or as maxima; and counts.
        """
        names, maxima = sorted(self._sums), sorted(self._maxima)
        on_device = [*(self._sums[name] for name in names), *(self._maxima[name].double() for name in maxima)]
        values = torch.stack(on_device).tolist() if on_device else []  # one wait for the device
        added = ranks.all_reduce_sum([*values[: len(names)], *self._counts.values()])
        sums = dict(zip(names, added, strict=False))
        metrics = {name: value / num_tokens for name, value in sums.items() if name != "loss"} if num_tokens else {}
        metrics["loss"] = sums.get("loss", 0.0)
        metrics |= {name: ranks.all_reduce_max(x) for name, x in zip(maxima, values[len(names) :], strict=True)}
        return metrics, dict(zip(COUNTS, map(int, added[len(names) :]), strict=True))


_DIFFERENCE = "sampling/sampling_logp_difference"  # old policy's logprobs minus the sampler's
PerTokenLoss = Callable[[Any], LossOutput]  # takes `LossInputs` for a policy, `ValueInputs` for a critic
PerSequence = Mapping[int, Tensor]  # sequence index -> [C]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Loss and metric sums of a micro-batch."""

    loss: Tensor  # [] sum of loss weight times per-token loss; carries the gradient
    outputs: Tensor  # [T] of the old model: logprobs of a policy, values of a critic
    entropies: Tensor | None = None  # [T] of the current policy; None for a critic
    sums: Mapping[str, Tensor]  # metric name -> [] sum over its tokens
    maxima: Mapping[str, Tensor]  # metric name -> [] maximum over its tokens; 0 if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """Policy loss `sum(loss_weight * per_token_loss)` of a step's micro-batches."""

    policy: Policy
    policy_loss: PolicyLoss
    temperature: float
    old_logprobs: PerSequence | None  # None if the current policy is the old one
    reference_logprobs: PerSequence | None  # None if the loss has no KL term
    gradients_in_forward: bool

    def __call__(
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], prefix: PrefixState | None
    ) -> MicroBatchLoss:
        """Run the forward pass of a micro-batch.

        Args:
            micro_batch: micro-batch on the policy's device.
            sequences: its sequences.
            prefix: computed prefix that all its sequences continue, if any.
        """
        old = concat_sequences(self.old_logprobs, sequences, micro_batch.loss_weights)
        reference = concat_sequences(self.reference_logprobs, sequences, micro_batch.loss_weights)
        sums: dict[str, Tensor] = {}
        entropies: list[Tensor] = []  # of consecutive tokens

        def token_loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
            """Return the weighted loss of consecutive tokens."""
            out = self.policy_loss(
                LossInputs(
                    logprobs=logprobs,
                    old_logprobs=logprobs.detach() if old is None else old[tokens],
                    sampling_logprobs=micro_batch.sampling_logprobs[tokens],
                    reference_logprobs=None if reference is None else reference[tokens],
                    entropy=entropy,
                    advantages=micro_batch.advantages[tokens],
                    trajectory_ids=micro_batch.trajectory_ids[tokens],
                )
            )
            entropies.append(entropy.detach())
            for name, values in {"entropy": entropies[-1], **out.token_metrics}.items():
                sums[name] = sums.get(name, 0.0) + values.sum()
            return micro_batch.loss_weights[tokens] * out.per_token_loss

        if self.gradients_in_forward and len(micro_batch.labels):
            loss, logprobs = self.policy.loss(micro_batch, token_loss, temperature=self.temperature, prefix=prefix)
        else:
            logprobs, entropy = self.policy.logprobs(micro_batch, temperature=self.temperature, prefix=prefix)
            assert entropy is not None
            loss = token_loss(logprobs, entropy, slice(None)).sum()
        old = logprobs.detach() if old is None else old
        differences = (old - micro_batch.sampling_logprobs).abs()
        return MicroBatchLoss(
            loss=loss,
            outputs=old,
            entropies=torch.cat(entropies),
            sums={"loss": loss.detach(), **sums, f"{_DIFFERENCE}/mean": differences.sum()},
            maxima={f"{_DIFFERENCE}/max": torch.cat([differences, differences.new_zeros(1)]).max()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStepLoss:
    """Value loss `sum(loss_weight * per_token_loss)` of a step's micro-batches."""

    policy: Critic
    value_loss: PerTokenLoss  # takes `ValueInputs`
    old_values: PerSequence | None  # None if the current critic is the old one

    def __call__(
        self, micro_batch: MicroBatch, sequences: Sequence[TrainSequence], prefix: PrefixState | None
    ) -> MicroBatchLoss:
        """Run the forward pass of a micro-batch; see `StepLoss`."""
        values = self.policy.values(micro_batch, prefix=prefix)
        old = concat_sequences(self.old_values, sequences, micro_batch.loss_weights)
        if old is None:
            old = values.detach()
        out = self.value_loss(ValueInputs(values=values, old_values=old, returns=micro_batch.returns.to(values)))
        loss = (micro_batch.loss_weights * out.per_token_loss).sum()
        sums = {name: metric.sum() for name, metric in out.token_metrics.items()}
        return MicroBatchLoss(loss=loss, outputs=old, sums={"loss": loss.detach(), **sums}, maxima={})


AnyStepLoss = StepLoss | ValueStepLoss


def per_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
    """Split values [T] of loss tokens into sequence index -> [C]."""
    parts = values.split([s.num_loss_tokens for s in sequences]) if sequences else ()
    return {s.index: part for s, part in zip(sequences, parts, strict=True)}


def concat_sequences(values: PerSequence | None, sequences: Sequence[TrainSequence], like: Tensor) -> Tensor | None:
    """Concatenate the values of sequences to [T]; None stays None."""
    if values is None:
        return None
    return torch.cat([like.new_zeros(0), *(values[s.index] for s in sequences)])
