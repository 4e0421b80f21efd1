"""What an advantage looks at. P prompts, G generations, K rewards, L tokens of the longest completion of the step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The scored completions of a whole step, in float64. NaN means "not judged"."""

    rewards: Tensor  # [P, G] of a completion: the sum of its token rewards
    reward_parts: Tensor  # [P, G, K] each reward by itself, without a penalty for leaving the reference
    reward_weights: Tensor  # [K]
    token_rewards: Tensor  # [P, G, L] the completion's reward at its last token, less any penalty at each; 0 beyond
    lengths: Tensor  # [P, G] int64
    values: Tensor | None = None  # [P, G, L] of the critic; 0 beyond the completion. None without one

    @property
    def token_mask(self) -> Tensor:
        """[P, G, L] bool: the tokens of judged completions."""
        within = torch.arange(self.token_rewards.shape[-1]) < self.lengths.unsqueeze(-1)
        return within & ~self.rewards.isnan().unsqueeze(-1)
