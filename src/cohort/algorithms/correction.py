"""Importance weights for tokens that another policy sampled than the one that learns from them. T loss tokens.

Three policies take part: the *sampling* policy gave the tokens, the *old* one is the trainer's when it first sees them,
and the *current* one moves away from it. The clipped ratio is current over old; this is old over sampling, which is 1
where the sampler has the trainer's weights and its arithmetic (decoupled PPO, arXiv:2110.00641).
"""

from typing import Literal

from torch import Tensor

from cohort.algorithms.trajectories import trajectory_sums
from cohort.batch import LossInputs, LossOutput, PolicyLoss

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def importance_weights(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    trajectory_ids: Tensor,
    *,
    per_sequence: bool,
    masks: bool,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Old over sampling probability of each token, or of its whole completion, bounded by `cap`.

    Bounding trades variance for a bias (truncated: arXiv:1802.01561). A difference of logprobs whose exponential
    overflows is above the cap like any other.

    Args:
        old_logprobs: [T]
        sampling_logprobs: [T]
        trajectory_ids: [T] which completion a token belongs to. Completions are whole.
        per_sequence: the product over a completion's tokens, for each of them; else each token's own.
        masks: weights above the cap become 0; else they become the cap.
        cap: largest weight.

    Returns:
        weights [T], detached, and which of them [T] were above the cap.
    """
    difference = (old_logprobs - sampling_logprobs).detach()
    if per_sequence:
        difference = trajectory_sums(difference, trajectory_ids)
    weights = difference.exp()
    above = weights > cap
    bounded = weights.masked_fill(above, 0.0 if masks else cap)
    return bounded.to(old_logprobs.dtype), above


def with_correction(policy_loss: PolicyLoss, correction: Correction, *, cap: float) -> PolicyLoss:
    """`policy_loss` times the importance weights."""
    per_sequence, masks = correction.startswith("sequence"), correction.endswith("mask")

    def corrected_loss(x: LossInputs) -> LossOutput:
        weights, above = importance_weights(
            x.old_logprobs, x.sampling_logprobs, x.trajectory_ids, per_sequence=per_sequence, masks=masks, cap=cap
        )
        loss = policy_loss(x)
        return LossOutput(
            per_token_loss=weights * loss.per_token_loss,
            token_metrics={
                **loss.token_metrics,
                "sampling/importance_weight/mean": weights,
                "sampling/importance_weight/clipped_ratio": above.to(weights.dtype),
            },
        )

    return corrected_loss
