"""The records of one step on the device.

B root rows of a micro-batch, S the longest, D branch rows, C the longest, T scored (completion) tokens, N completions
of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Root rows, and branch rows that each go on from one of them, padded on the right.

    With shared prompts a root is a prompt and a branch a completion of it. Without, a root is a whole sequence and
    there are no branches. The last token of a sequence predicts nothing that is scored and is not an input.
    """

    root_ids: Tensor  # [B, S] int64
    root_lengths: Tensor  # [B] int64
    branch_ids: Tensor  # [D, C] int64
    branch_roots: Tensor  # [D] int64, the root row that a branch goes on from
    source: Tensor  # [T] int64, index into the B * S + D * C positions: the one that predicts scored token t
    targets: Tensor  # [T] int64, the scored tokens
    sampling_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_weights: Tensor  # [T] fixed over the whole step
    sequence_ids: Tensor  # [T] int64, which of the step's N completions the token belongs to
    num_input_tokens: int  # tokens of both kinds of rows that are not padding

    @property
    def num_padded_tokens(self) -> int:
        """Positions that the model computes: what the token budget caps."""
        return self.root_ids.numel() + self.branch_ids.numel()

    def to(self, device: torch.device, dtype: torch.dtype) -> "MicroBatch":
        """The same micro-batch on `device`, its real numbers in `dtype`."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype, non_blocking=True)

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: moved(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One step's completions as micro-batches, each under the token budget."""

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int  # N
    num_over_budget: int  # sequences longer than the budget; each is alone in its micro-batch

    @property
    def num_scored_tokens(self) -> int:
        """Completion tokens of the step."""
        return sum(len(m.targets) for m in self.micro_batches)

    @property
    def padding_fraction(self) -> float:
        """Share of the computed positions that hold padding."""
        padded = sum(m.num_padded_tokens for m in self.micro_batches)
        return 1.0 - sum(m.num_input_tokens for m in self.micro_batches) / padded if padded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch at loss time."""

    logprobs: Tensor  # [T] current policy, carries the gradient
    old_logprobs: Tensor  # [T] the policy at the first update of this rollout
    sampling_logprobs: Tensor  # [T] the policy that sampled the tokens, as the sampler computed them
    reference_logprobs: Tensor | None  # [T] the frozen reference; None where the algorithm has no KL term
    advantages: Tensor  # [T]
    sequence_ids: Tensor  # [T] int64, for sequence-level ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a policy loss returns: a loss per token, not reduced, and numbers to average over the step's tokens."""

    per_token_loss: Tensor  # [T]
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [T], detached
