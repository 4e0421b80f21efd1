"""Gradients and updates. Few verbs: `forward_backward`, `optim_step`, `state_dict`, `load_state_dict`.

T scored tokens of a micro-batch, C of a completion.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.batch import LossInputs, LossOutput, MicroBatch, TrainBatch
from cohort.config import TrainConfig
from cohort.errors import TrainingError
from cohort.packing import collate
from cohort.policy import Policy
from cohort.records import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """What one pass over a batch gives besides the gradients."""

    metrics: Mapping[str, float]
    logprobs: Mapping[int, Tensor]  # sequence index -> [C], detached: the old logprobs of later updates
    num_inputs: int  # tokens that the model was given
    num_positions: int  # positions that it computed: more than the tokens where there is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """One optimizer step."""

    grad_norm: float  # before clipping
    learning_rate: float


class TrainEngine:
    """Holds the policy that is trained, its optimizer and, where the loss has a KL term, the frozen reference."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        learning_rate: Callable[[int], float],
        temperature: float,
        reference: Policy | None,
    ):
        """Make the optimizer.

        Args:
            policy: trained in place.
            config: the `train` section.
            learning_rate: number of updates done -> learning rate of the next.
            temperature: of sampling; the logprobs of the loss are of the same distribution.
            reference: frozen model for a KL term.
        """
        self.policy = policy
        self.updates_done = 0
        self._config = config
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._reference = reference
        parameters = [p for p in policy.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},  # norms and biases do not decay
        ]
        self._optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=policy.device.type in ("cpu", "cuda"),
        )

    def forward_backward(
        self,
        batch: TrainBatch,
        policy_loss: Callable[[LossInputs], LossOutput],
        *,
        old_logprobs: Mapping[int, Tensor] | None = None,
    ) -> ForwardBackwardResult:
        """Add the gradient of `sum(loss_weight * per_token_loss)` over the whole batch to the parameters' gradients.

        Args:
            batch: micro-batches; how the step was split over them does not change the sum.
            policy_loss: per-token loss, not reduced.
            old_logprobs: sequence index -> [C]; None on the first pass over a rollout, where the current policy is the
                old one.
        """
        self.policy.model.train()
        totals: dict[str, Tensor] = {}
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        largest_difference = torch.zeros((), device=self.policy.device, dtype=dtype)
        logprobs: dict[int, Tensor] = {}
        num_inputs = num_positions = 0
        for sequences in batch.micro_batches:
            micro_batch = collate(sequences, share_prompts=self.policy.shares_prompts)
            num_inputs += len(micro_batch.input_ids)
            num_positions += self.policy.num_positions(micro_batch)
            micro_batch = micro_batch.to(self.policy.device, dtype)
            current, entropy = self.policy.logprobs(micro_batch, temperature=self._temperature)
            if old_logprobs is None or not sequences:
                old = current.detach()
            else:
                old = torch.cat([old_logprobs[s.index] for s in sequences])
            out = policy_loss(self._loss_inputs(micro_batch, current, old))
            loss = (micro_batch.loss_weights * out.per_token_loss).sum()
            loss.backward()
            logprobs |= _per_sequence(current.detach(), sequences)
            difference = (old - micro_batch.sampling_logprobs).abs()
            largest_difference = torch.cat([difference, largest_difference.unsqueeze(0)]).max()  # there may be none
            sums = {"loss": loss.detach(), "entropy": entropy.sum(), "difference": difference.sum()}
            sums |= {name: values.sum() for name, values in out.token_metrics.items()}
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value.double()
        return ForwardBackwardResult(
            metrics=_token_means(totals, batch.num_scored_tokens)
            | {"sampling/sampling_logp_difference/max": largest_difference.item()},
            logprobs=logprobs,
            num_inputs=num_inputs,
            num_positions=num_positions,
        )

    def optim_step(self) -> OptimResult:
        """Clip the gradient, update the weights, forget the gradient.

        Raises:
            TrainingError: the gradient is NaN or infinite; the weights are as before.
        """
        learning_rate = self._learning_rate(self.updates_done)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # nothing had a gradient in this step: AdamW's momentum moves the weights still
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm).item()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at optimizer step {self.updates_done + 1}; the weights were not "
                f"changed. Lower train.learning_rate (now {learning_rate:.3g}) or look at the completions"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates_done += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state and counters, to be resumed from. The weights are saved as a model folder."""
        return {"optimizer": self._optimizer.state_dict(), "updates_done": self.updates_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates_done = state["updates_done"]

    def _loss_inputs(self, micro_batch: MicroBatch, current: Tensor, old: Tensor) -> LossInputs:
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(micro_batch, temperature=self._temperature)
        return LossInputs(
            logprobs=current,
            old_logprobs=old,
            sampling_logprobs=micro_batch.sampling_logprobs,
            reference_logprobs=reference,
            advantages=micro_batch.advantages,
            sequence_ids=micro_batch.sequence_ids,
        )


def _per_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
    """Values of scored tokens [T] by the index of their sequence, [C] each."""
    parts = values.split([s.num_completion_tokens for s in sequences]) if sequences else ()
    return {s.index: part for s, part in zip(sequences, parts, strict=True)}


def _token_means(totals: Mapping[str, Tensor], num_tokens: int) -> dict[str, float]:
    if not totals:
        return {"loss": 0.0}
    means = {name: total.item() / num_tokens for name, total in totals.items()}
    means["loss"] = totals["loss"].item()  # a weighted sum already
    means["sampling/sampling_logp_difference/mean"] = means.pop("difference")
    return means
