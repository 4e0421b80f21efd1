"""From the `algorithm` section to functions. Branching on names ends here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from cohort.algorithms import advantages, losses, weights
from cohort.algorithms.correction import Correction, with_correction
from cohort.algorithms.critic import CriticFunctions, clipped_value, gae_returns
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.losses import PolicyLoss
from cohort.batch import LossInputs, LossOutput
from cohort.config import COMPONENTS, AlgorithmConfig
from cohort.records import Estimate, FloatArray, IntArray

Advantage = Callable[[AdvantageInputs], Tensor]  # -> [P, G], or [P, G, L]
LossWeight = Callable[[IntArray, np.ndarray], FloatArray]  # lengths [N], included [N] -> weights [N]
MODULES = {"advantage": advantages, "policy_loss": losses, "loss_weight": weights}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Three pure functions, and what they need from the rest of the system."""

    advantage: Advantage
    policy_loss: PolicyLoss
    loss_weight: LossWeight
    critic: CriticFunctions | None  # None: no critic is trained
    mask_truncated: bool
    estimates: frozenset[Estimate]  # that it asks for before any sequence is trained on
    needs_reference: bool  # in the loss
    learns_without_advantage: bool  # the loss has terms that the advantage does not multiply


def build_algorithm(
    config: AlgorithmConfig,
    *,
    max_completion_tokens: int,
    auto_correction: Correction = "none",
    value_clip: float = 0.2,
) -> Algorithm:
    """The algorithm that `config` describes, with its numbers filled in.

    Args:
        config: the `algorithm` section.
        max_completion_tokens: longest completion.
        auto_correction: what `sampling_correction: auto` means; none where the sampler computes as the trainer does.
        value_clip: of the critic, where the algorithm has one.
    """
    parts = {kind: _function(config, kind) for kind in MODULES}
    if config.loss_weight == "constant":  # the one number that is another section's
        parts["loss_weight"] = partial(weights.constant, max_completion_tokens=max_completion_tokens)
    correction = auto_correction if config.sampling_correction == "auto" else config.sampling_correction
    loss = with_correction(parts["policy_loss"], correction, cap=config.sampling_correction_cap)
    return Algorithm(
        advantage=parts["advantage"],
        policy_loss=_with_kl(loss, beta=config.beta) if config.beta > 0 else loss,
        loss_weight=parts["loss_weight"],
        critic=_critic(config, value_clip=value_clip) if config.needs_critic else None,
        mask_truncated=config.mask_truncated_completions,
        estimates=frozenset({"values"} if config.needs_critic else ()),
        needs_reference=config.beta > 0,
        learns_without_advantage=config.beta > 0,
    )


def _function(config: AlgorithmConfig, kind: str) -> Any:
    """The function of a component, with the keys that it reads filled in."""
    name = getattr(config, kind)
    function = getattr(MODULES[kind], name)
    keys = COMPONENTS[kind][name].keys
    return partial(function, **{key: getattr(config, key) for key in keys})


def _critic(config: AlgorithmConfig, *, value_clip: float) -> CriticFunctions:
    assert config.gamma is not None and config.gae_lambda is not None, "filled in by what reads them"
    return CriticFunctions(
        returns=partial(gae_returns, gamma=config.gamma, gae_lambda=config.gae_lambda),
        loss=partial(clipped_value, value_clip=value_clip),
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
