"""The named algorithms, each a choice of three functions. Branching on names ends here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from cohort.algorithms import advantages, losses, weights
from cohort.algorithms.correction import Correction, with_correction
from cohort.algorithms.losses import PolicyLoss
from cohort.batch import LossInputs, LossOutput
from cohort.config import AlgorithmConfig, DapoConfig, DrGrpoConfig, GrpoConfig
from cohort.records import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Three pure functions, and what they need from the rest of the system."""

    advantage: Callable[[Tensor], Tensor]  # rewards [P, G] -> advantages [P, G]
    policy_loss: PolicyLoss
    loss_weight: Callable[[IntArray, np.ndarray], FloatArray]  # lengths [N], included [N] -> weights [N]
    mask_truncated: bool
    needs_reference: bool


def build_algorithm(
    config: AlgorithmConfig, *, max_completion_tokens: int, auto_correction: Correction = "none"
) -> Algorithm:
    """The algorithm that `config` names, with its numbers filled in.

    Args:
        config: the `algorithm` section.
        max_completion_tokens: longest completion.
        auto_correction: what `sampling_correction: auto` means; none where the sampler computes as the trainer does.
    """
    advantage: Callable[[Tensor], Tensor]
    weight: Callable[[IntArray, np.ndarray], FloatArray]
    clip = partial(losses.clipped_surrogate, clip_low=config.clip_low, clip_high=config.clip_high)
    match config:
        case GrpoConfig():
            advantage = partial(advantages.group_mean_std, std_epsilon=config.std_epsilon)
            weight = weights.sequence_mean
        case DrGrpoConfig():
            advantage = advantages.group_mean
            weight = partial(weights.constant, max_completion_tokens=max_completion_tokens)
        case DapoConfig():
            advantage = partial(advantages.group_mean_std, std_epsilon=config.std_epsilon)
            weight = weights.token_mean
    correction = auto_correction if config.sampling_correction == "auto" else config.sampling_correction
    loss = with_correction(clip, correction, cap=config.sampling_correction_cap)
    return Algorithm(
        advantage=advantage,
        policy_loss=_with_kl(loss, beta=config.beta) if config.beta > 0 else loss,
        loss_weight=weight,
        mask_truncated=config.mask_truncated_completions,
        needs_reference=config.beta > 0,
    )


def _with_kl(policy_loss: PolicyLoss, *, beta: float) -> PolicyLoss:
    """`policy_loss` plus beta times the k3 estimate of the KL divergence from the reference."""

    def loss_with_kl(x: LossInputs) -> LossOutput:
        assert x.reference_logprobs is not None, "an algorithm with a KL term was built without a reference"
        loss = policy_loss(x)
        kl = losses.kl_k3(x.logprobs, x.reference_logprobs)
        return LossOutput(
            per_token_loss=loss.per_token_loss + beta * kl, token_metrics={**loss.token_metrics, "kl": kl.detach()}
        )

    return loss_with_kl
