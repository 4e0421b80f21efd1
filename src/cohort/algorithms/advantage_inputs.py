"""Inputs of an advantage. P prompts, G generations, K rewards, L tokens of the step's longest completion."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Scored completions of a whole step, in float64. NaN means "not scored"."""

    rewards: Tensor  # [P, G] sum of a completion's token rewards
    reward_parts: Tensor  # [P, G, K] each reward separately, without the KL penalty
    reward_weights: Tensor  # [K]
    token_rewards: Tensor  # [P, G, L] reward at the last token, minus any KL penalty at each token; 0 past the end
    lengths: Tensor  # [P, G] int64
    values: Tensor | None = None  # [P, G, L] critic's values, 0 past the end; None without a critic

    @property
    def token_mask(self) -> Tensor:
        """[P, G, L] bool: tokens of scored completions."""
        within = torch.arange(self.token_rewards.shape[-1]) < self.lengths.unsqueeze(-1)
        return within & ~self.rewards.isnan().unsqueeze(-1)
