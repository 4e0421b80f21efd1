"""Regularizers around a policy loss: KL penalty, entropy bonus, and the mask of off-policy completions.

T loss tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.algorithms.losses import MAX_LOG_RATIO, log_ratio
from cohort.algorithms.statistics import trajectory_means
from cohort.packing.batch import LossInputs, LossOutput, PolicyLoss

KlEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs, reference logprobs -> KL per token, all of one shape
LossTransform = Callable[[PolicyLoss, "Coefficients"], PolicyLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Coefficients of the regularizers in one update, equal on all ranks."""

    kl: float
    entropy: float


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log policy - log reference (Schulman, "Approximating KL Divergence", 2020): unbiased, may be negative.

    As a loss its gradient is 0 in expectation; in the reward it gives the KL gradient.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the square of k1 (Schulman, 2020): biased. On-policy its gradient is that of KL(policy || reference)."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log reference - log policy (Schulman, 2020): unbiased, nonnegative, low variance.

    On-policy its gradient is that of KL(reference || policy). d is clamped to `MAX_LOG_RATIO` to keep the exponential
    finite; tokens beyond it have no gradient.
    """
    difference = (reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def with_kl(policy_loss: PolicyLoss, *, coefficient: float, estimator: KlEstimator, unbiased: bool) -> PolicyLoss:
    """Add `coefficient` times the estimated KL divergence from the reference to `policy_loss`.

    Args:
        policy_loss: per-token loss.
        coefficient: beta.
        estimator: KL estimator.
        unbiased: multiply the estimate by current over old probability, with gradient. The gradient of k1 and k3 then
            is ratio * log(policy / reference) * grad log policy, that of KL(policy || reference) (DeepSeek-V3.2,
            arXiv:2512.02556).

    Metrics: the estimate, without the ratio.
    """

    def loss_with_kl(x: LossInputs) -> LossOutput:
        assert x.reference_logprobs is not None, "a KL loss needs a reference"
        out = policy_loss(x)
        kl = estimator(x.logprobs, x.reference_logprobs)
        term = log_ratio(x).exp() * kl if unbiased else kl
        return LossOutput(
            per_token_loss=out.per_token_loss + coefficient * term,
            token_metrics={**out.token_metrics, "kl": kl.detach()},
        )

    return loss_with_kl


def with_entropy_bonus(policy_loss: PolicyLoss, *, coefficient: float) -> PolicyLoss:
    """Subtract `coefficient` times the entropy at each token, in nats, from `policy_loss` (arXiv:1602.01783).

    The gradient is that of the whole distribution, not only of the sampled token.
    """

    def loss_with_bonus(x: LossInputs) -> LossOutput:
        out = policy_loss(x)
        return LossOutput(per_token_loss=out.per_token_loss - coefficient * x.entropy, token_metrics=out.token_metrics)

    return loss_with_bonus


def with_off_policy_mask(policy_loss: PolicyLoss, *, threshold: float) -> PolicyLoss:
    """Set `policy_loss` to 0 on tokens with negative advantage in completions that have become too off-policy.

    The distance is the mean over a completion's tokens of log sampling policy - log current policy (DeepSeek-V3.2,
    arXiv:2512.02556). Completions are whole. Masked tokens still count in the loss weights.

    Metrics: fraction of masked tokens.
    """

    def masked_loss(x: LossInputs) -> LossOutput:
        out = policy_loss(x)
        distance = trajectory_means(x.sampling_logprobs - x.logprobs.detach(), x.trajectory_ids)
        masked = (x.advantages < 0) & (distance > threshold)
        return LossOutput(
            per_token_loss=out.per_token_loss.masked_fill(masked, 0.0),
            token_metrics={**out.token_metrics, "sampling/off_policy_masked_ratio": masked.to(distance.dtype)},
        )

    return masked_loss
