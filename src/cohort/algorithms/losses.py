"""Policy losses, per token and not reduced. T scored tokens."""

from collections.abc import Callable

import torch

from cohort.batch import LossInputs, LossOutput

PolicyLoss = Callable[[LossInputs], LossOutput]


def clipped(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Clipped policy-gradient surrogate (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476).

    Metrics: share of tokens clipped from below, from above, and either.
    """
    ratio = torch.exp(x.logprobs - x.old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * x.advantages, clipped * x.advantages)
    low = (ratio < 1 - clip_low) & (x.advantages < 0)
    high = (ratio > 1 + clip_high) & (x.advantages > 0)
    metrics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    return LossOutput(per_token_loss=loss, token_metrics={k: v.to(loss.dtype) for k, v in metrics.items()})
