"""What is put around a policy loss: KL divergence from the reference, entropy bonus, the mask of stale completions.

T loss tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.algorithms.losses import MAX_LOG_RATIO, log_ratio
from cohort.algorithms.trajectories import trajectory_means
from cohort.batch import LossInputs, LossOutput, PolicyLoss

Estimator = Callable[[Tensor, Tensor], Tensor]  # logprobs, reference logprobs -> KL per token, all of one shape
Term = Callable[[PolicyLoss, "Coefficients"], PolicyLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The weights of the terms in one update; rank 0 may adapt them, and every rank gets the same."""

    kl: float
    entropy: float


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log policy - log reference (Schulman, "Approximating KL Divergence", 2020): unbiased, may be negative.

    The expectation of its own gradient is 0, so as a term of a loss it does nothing; as a reward it is the right one.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the square of k1 (Schulman, 2020): biased, and its gradient is that of KL(policy || reference) on policy."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log reference - log policy (Schulman, 2020): unbiased, never negative, low variance.

    Its gradient on policy is that of KL(reference || policy), the other way round. d is at most `MAX_LOG_RATIO`, so
    that its exponential is finite; beyond it a token has no gradient.
    """
    difference = (reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def with_kl(policy_loss: PolicyLoss, *, coefficient: float, estimator: Estimator, unbiased: bool) -> PolicyLoss:
    """`policy_loss` plus coefficient times the estimate of the KL divergence from the reference.

    Args:
        policy_loss: of each token.
        coefficient: beta.
        estimator: of the divergence.
        unbiased: multiply the estimate by current over old probability. With the ratio's gradient that of k1 and of k3
            becomes ratio * log(policy / reference) * grad log policy, the gradient of KL(policy || reference)
            (DeepSeek-V3.2, arXiv:2512.02556).

    Metrics: the estimate, without the ratio.
    """

    def loss_with_kl(x: LossInputs) -> LossOutput:
        assert x.reference_logprobs is not None, "an algorithm with a KL term was built without a reference"
        out = policy_loss(x)
        kl = estimator(x.logprobs, x.reference_logprobs)
        term = log_ratio(x).exp() * kl if unbiased else kl
        return LossOutput(
            per_token_loss=out.per_token_loss + coefficient * term,
            token_metrics={**out.token_metrics, "kl": kl.detach()},
        )

    return loss_with_kl


def with_entropy_bonus(policy_loss: PolicyLoss, *, coefficient: float) -> PolicyLoss:
    """`policy_loss` less coefficient times the entropy of the distribution at each token, in nats (arXiv:1602.01783).

    The gradient is that of the whole distribution and not of the sampled token only.
    """

    def loss_with_bonus(x: LossInputs) -> LossOutput:
        out = policy_loss(x)
        return LossOutput(per_token_loss=out.per_token_loss - coefficient * x.entropy, token_metrics=out.token_metrics)

    return loss_with_bonus


def with_off_policy_mask(policy_loss: PolicyLoss, *, threshold: float) -> PolicyLoss:
    """`policy_loss`, 0 on tokens of negative advantage in completions that the policy has moved away from.

    How far is the mean over a completion's tokens of log sampling policy - log current policy (DeepSeek-V3.2,
    arXiv:2512.02556). Completions are whole. What is masked still counts in the loss weights.

    Metrics: share of tokens masked.
    """

    def masked_loss(x: LossInputs) -> LossOutput:
        out = policy_loss(x)
        moved = trajectory_means(x.sampling_logprobs - x.logprobs.detach(), x.trajectory_ids)
        masked = (x.advantages < 0) & (moved > threshold)
        return LossOutput(
            per_token_loss=out.per_token_loss.masked_fill(masked, 0.0),
            token_metrics={**out.token_metrics, "sampling/off_policy_masked_ratio": masked.to(moved.dtype)},
        )

    return masked_loss
