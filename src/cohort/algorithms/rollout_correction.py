"""Importance weights that correct for the mismatch between sampler and trainer. T loss tokens.

Three policies: the *sampling* policy generated the tokens, the *old* policy is the trainer's at the start of the
rollout's updates, the *current* policy is being updated. PPO's ratio is current over old; this weight is old over
sampling. It is 1 if the sampler has the trainer's weights and numerics (decoupled PPO, arXiv:2110.00641).
"""

from typing import Literal

from torch import Tensor

from cohort.algorithms.statistics import trajectory_sums
from cohort.packing.batch import LossInputs, LossOutput, PolicyLoss

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
    """Return old over sampling probability of each token or whole completion, bounded by `cap`.

    Bounding trades variance for bias (truncation: arXiv:1802.01561). Differences whose exponential overflows are above
    the cap like any other.

    Args:
        old_logprobs: [T]
        sampling_logprobs: [T]
        trajectory_ids: [T] completion of each token. Completions are whole.
        per_sequence: use the product over a completion's tokens for each of them; else each token's own weight.
        masks: set weights above the cap to 0; else to the cap.
        cap: maximum weight.

    Returns:
        weights [T], detached, and a mask [T] of those above the cap.
    """
    difference = (old_logprobs - sampling_logprobs).detach()
    if per_sequence:
        difference = trajectory_sums(difference, trajectory_ids)
    weights = difference.exp()
    above = weights > cap
    bounded = weights.masked_fill(above, 0.0 if masks else cap)
    return bounded.to(old_logprobs.dtype), above


def with_correction(policy_loss: PolicyLoss, correction: Correction, *, cap: float) -> PolicyLoss:
    """Multiply `policy_loss` by the importance weights."""
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
