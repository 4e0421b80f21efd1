"""Policy losses, per token and unreduced. T loss tokens.

The ratio is current over old probability. Its logarithm is clamped to `MAX_LOG_RATIO`, so that no exponential
overflows: a token with weight and advantage 0 cannot make the sum NaN, even if its probability is 0 (logprob -inf).
Sequence-level losses give each token its completion's value, so that with the loss weight `sequence_mean` their sum is
the papers' mean over completions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cohort.algorithms.statistics import trajectory_means, trajectory_sums
from cohort.packing.batch import LossInputs, LossOutput

MAX_LOG_RATIO = 20.0  # a ratio of 5e8; larger ratios have no gradient
MIN_LOG_WEIGHT = -18.420680743952367  # ln 1e-8, where VESPO's weight is 0 in float32


def clipped(x: LossInputs, *, clip_low: float, clip_high: float, delta: float | None = None) -> LossOutput:
    """Clipped policy-gradient surrogate (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476).

    `delta` (dual clip, arXiv:1912.09729; INTELLECT-2, arXiv:2505.07291) bounds the ratio of tokens with negative
    advantage, whose loss is otherwise unbounded. The formulas of the two papers agree for delta > 1 + clip_high, which
    the configuration enforces.

    Metrics: fraction of tokens clipped from below, from above, and either.
    """
    return _surrogate(_ratio(x), x.advantages, clip_low=clip_low, clip_high=clip_high, delta=delta)


def gspo(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Clipped surrogate with the geometric mean of a completion's token ratios (GSPO, arXiv:2507.18071)."""
    ratio = trajectory_means(log_ratio(x), x.trajectory_ids).exp().to(x.logprobs.dtype)
    return _surrogate(ratio, x.advantages, clip_low=clip_low, clip_high=clip_high)


def gspo_token(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Token-level variant of `gspo` (GSPO-token, arXiv:2507.18071).

    Its gradient equals that of `gspo` if all tokens of a completion have the same advantage.
    """
    sequence_ratio = trajectory_means(log_ratio(x).detach(), x.trajectory_ids).exp().to(x.logprobs.dtype)
    own = x.logprobs.masked_fill(x.logprobs.isinf(), 0.0)
    ratio = sequence_ratio * torch.exp(own - own.detach())
    return _surrogate(ratio, x.advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(x: LossInputs, *, clip_high: float) -> LossOutput:
    """REINFORCE weighted by the detached ratio, capped at 1 + clip_high (CISPO, arXiv:2506.13585).

    Every token keeps its gradient. The weight is 1 on-policy, and has no lower bound, as in the paper.
    """
    ratio = _ratio(x).detach()
    above = ratio > 1 + clip_high
    weight = ratio.clamp(max=1 + clip_high)
    return _output(-weight * _reinforced(x), {"clip_ratio/high_mean": above})


def sapo(x: LossInputs, *, tau_positive: float, tau_negative: float) -> LossOutput:
    """Sigmoid gate on the ratio instead of clipping (SAPO, arXiv:2511.20347): 4 / tau * sigmoid(tau * (ratio - 1)).

    The slope at ratio 1 is 1, so the on-policy gradient is the policy gradient. `tau_positive` applies to positive
    advantages.
    """
    taus = x.advantages.new_tensor([tau_negative, tau_positive])
    tau = taus[(x.advantages > 0).long()]
    gate = 4 / tau * torch.sigmoid(tau * (_ratio(x) - 1))
    return _output(-gate * x.advantages)


def vespo(
    x: LossInputs,
    *,
    vespo_k_positive: float,
    vespo_lambda_positive: float,
    vespo_k_negative: float,
    vespo_lambda_negative: float,
) -> LossOutput:
    """REINFORCE weighted by w^k * exp(lambda * (1 - w)) of the completion's ratio w (VESPO, arXiv:2602.10693).

    w is the product of the completion's token ratios. The weight is detached, and 1 on-policy.

    Metrics: the weight.
    """
    nonnegative = (x.advantages >= 0).long()
    k = x.advantages.new_tensor([vespo_k_negative, vespo_k_positive]).double()[nonnegative]
    decay = x.advantages.new_tensor([vespo_lambda_negative, vespo_lambda_positive]).double()[nonnegative]
    log_w = trajectory_sums(log_ratio(x).detach(), x.trajectory_ids).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    weight = torch.exp(k * log_w + decay * (1 - log_w.exp())).to(x.logprobs.dtype)
    return _output(-weight * _reinforced(x), {"policy_weight/mean": weight})


def gmpo(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Geometric mean of token ratios, each clipped only where clipping lowers the objective (GMPO, arXiv:2507.20673).

    Bounds are in log space: token ratios lie between exp(-clip_low) and exp(clip_high).
    """
    token_log_ratio = log_ratio(x)
    low = (token_log_ratio < -clip_low) & (x.advantages < 0)
    high = (token_log_ratio > clip_high) & (x.advantages > 0)
    bounded = torch.where(low | high, token_log_ratio.detach().clamp(-clip_low, clip_high), token_log_ratio)
    ratio = trajectory_means(bounded, x.trajectory_ids).exp().to(x.logprobs.dtype)
    return _output(-ratio * x.advantages, _clip_metrics(low, high))


def reinforce(x: LossInputs) -> LossOutput:
    """Policy gradient without a ratio: -advantage * logprob (REINFORCE, Williams 1992)."""
    return _output(-_reinforced(x))


def log_ratio(x: LossInputs) -> Tensor:
    """Log of current over old probability [T], clamped so that its exponential is finite."""
    impossible = (x.advantages == 0) & x.logprobs.isinf() & (x.logprobs == x.old_logprobs)  # inf - inf is NaN
    difference = x.logprobs.masked_fill(impossible, 0.0) - x.old_logprobs.masked_fill(impossible, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(x: LossInputs) -> Tensor:
    return log_ratio(x).exp()


def _reinforced(x: LossInputs) -> Tensor:
    """advantage * logprob; 0 for advantage 0, where the logprob may be infinite."""
    return x.advantages * x.logprobs.masked_fill(x.advantages == 0, 0.0)


def _surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, delta: float | None = None
) -> LossOutput:
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(capped * advantages, bounded * advantages)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    return _output(loss, _clip_metrics(low, high))


def _clip_metrics(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def _output(loss: Tensor, metrics: Mapping[str, Tensor] | None = None) -> LossOutput:
    return LossOutput(per_token_loss=loss, token_metrics={k: v.to(loss.dtype) for k, v in (metrics or {}).items()})
