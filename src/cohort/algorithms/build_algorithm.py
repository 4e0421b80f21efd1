"""Build an algorithm's functions from the `algorithm` section. No other code branches on algorithm names.

P prompts, G generations, L tokens of the longest completion, N completions of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from cohort.algorithms import advantages, custom_functions, loss_weights, losses, regularizers
from cohort.algorithms.adaptive_coefficients import (
    CoefficientState,
    coefficient_metrics,
    coefficients,
    has_entropy_bonus,
    update_coefficients,
)
from cohort.algorithms.gae import CriticFunctions, clipped_value, gae_returns
from cohort.algorithms.regularizers import Coefficients, KlEstimator, LossTransform
from cohort.algorithms.rollout_correction import Correction, with_correction
from cohort.algorithms.statistics import AdvantageInputs
from cohort.config import COMPONENTS, AlgorithmConfig, Component, CustomFunction
from cohort.errors import UserError
from cohort.packing.batch import PolicyLoss
from cohort.records import FloatArray, ForwardOnlyField, IntArray

Advantage = Callable[[AdvantageInputs], Tensor]  # -> [P, G], or [P, G, L]
LossWeight = Callable[[IntArray, np.ndarray], FloatArray]  # lengths [N], included [N] -> weights [N]
MODULES = {"advantage": advantages, "policy_loss": losses, "loss_weight": loss_weights}
CUSTOM_LOADERS: dict[str, Callable[[CustomFunction], Any]] = {
    "advantage": custom_functions.load_advantage,
    "policy_loss": custom_functions.load_policy_loss,
    "loss_weight": custom_functions.load_loss_weight,
}
KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": regularizers.k1, "k2": regularizers.k2, "k3": regularizers.k3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The pure functions of an algorithm, and what they need from the rest of the system."""

    advantage: Advantage
    loss_with: Callable[[Coefficients], PolicyLoss]  # policy loss with its regularizers
    loss_weight: LossWeight
    critic: CriticFunctions | None  # None: no critic is trained
    mask_truncated: bool
    forward_only_outputs: frozenset[ForwardOnlyField]  # computed before the first update
    needs_reference: bool  # in the loss
    reads_token_rewards: bool  # its advantage or its critic does
    learns_without_advantage: bool  # the loss has terms that the advantage does not multiply
    sequence_level: bool  # a token's loss depends on the other tokens of its trajectory
    reward_kl: KlEstimator | None  # subtracted from each token's reward, times its coefficient
    top_entropy_quantile: float  # share of the step's tokens that have a policy gradient
    initial_coefficients: CoefficientState  # at the start of a run
    coefficients: Callable[[CoefficientState], Coefficients]
    coefficient_metrics: Callable[[Coefficients], dict[str, float]]
    # state, metrics of an update, number of its completions -> next state
    update_coefficients: Callable[[CoefficientState, Mapping[str, float], int], CoefficientState]

    @property
    def policy_loss(self) -> PolicyLoss:
        """The policy loss with the initial coefficients."""
        return self.loss_with(self.coefficients(self.initial_coefficients))


def build_algorithm(
    config: AlgorithmConfig,
    *,
    max_completion_tokens: int,
    auto_correction: Correction = "none",
    value_clip: float = 0.2,
) -> Algorithm:
    """Build the algorithm described by `config`.

    Args:
        config: the `algorithm` section.
        max_completion_tokens: maximum sampled tokens of a completion, or of a trajectory of several turns.
        auto_correction: meaning of `sampling_correction: auto`; none if the sampler's logprobs equal the trainer's.
        value_clip: clip range of the critic's loss, if there is a critic.

    Raises:
        UserError: a custom function fails to load, does not accept its arguments, or breaks a rule.
    """
    parts = {kind: _function(config, kind) for kind in MODULES}
    if config.loss_weight == "constant":  # its parameter is in another section
        parts["loss_weight"] = partial(loss_weights.constant, max_completion_tokens=max_completion_tokens)
    correction = auto_correction if config.sampling_correction == "auto" else config.sampling_correction
    traits = _loss_traits(config, parts["policy_loss"])
    kl_in_reward = config.kl_in == "reward"
    needed: dict[ForwardOnlyField, bool] = {
        "logprobs": kl_in_reward,
        "reference_logprobs": kl_in_reward,
        "entropies": config.top_entropy_quantile < 1,
        "values": config.needs_critic,
    }
    return Algorithm(
        advantage=parts["advantage"],
        loss_with=partial(_composed, parts["policy_loss"], _loss_transforms(config, correction)),
        loss_weight=parts["loss_weight"],
        critic=_critic(config, value_clip=value_clip) if config.needs_critic else None,
        mask_truncated=config.mask_truncated_completions,
        forward_only_outputs=frozenset(name for name, is_needed in needed.items() if is_needed),
        needs_reference=config.kl_in == "loss",
        reads_token_rewards=config.takes_token_rewards
        or config.needs_critic
        or isinstance(config.advantage, CustomFunction),
        learns_without_advantage=config.kl_in == "loss" or has_entropy_bonus(config) or traits.learns_without_advantage,
        sequence_level=traits.sequence_level
        or correction.startswith("sequence")
        or config.off_policy_mask_threshold is not None,
        reward_kl=KL_ESTIMATORS[str(config.kl_estimator)] if kl_in_reward else None,
        top_entropy_quantile=config.top_entropy_quantile,
        initial_coefficients=CoefficientState(kl=config.beta, entropy=config.entropy_coef),
        coefficients=partial(coefficients, config),
        coefficient_metrics=partial(coefficient_metrics, config),
        update_coefficients=partial(update_coefficients, config),
    )


def check_custom_functions(
    config: AlgorithmConfig, *, num_generations: int, num_rewards: int, gradients_in_forward: bool
) -> None:
    """Load and try the user's custom functions, before anything slow is started.

    Args:
        config: the `algorithm` section.
        num_generations: completions per prompt of the run.
        num_rewards: number of reward functions.
        gradients_in_forward: `train.gradients_in_forward`.

    Raises:
        UserError: names the key, the function and the rule that it breaks.
    """
    if isinstance(config.advantage, CustomFunction):
        custom_functions.try_advantage(config.advantage, num_generations=num_generations, num_rewards=num_rewards)
    if isinstance(config.loss_weight, CustomFunction):
        custom_functions.try_loss_weight(config.loss_weight)
    if isinstance(config.policy_loss, CustomFunction):
        traits = custom_functions.try_policy_loss(config.policy_loss, has_reference=config.kl_in == "loss")
        if traits.sequence_level and gradients_in_forward:
            raise UserError(
                f"algorithm.policy_loss: {config.policy_loss.use!r}: a token's loss depends on the other tokens of its "
                f"completion, but train.gradients_in_forward: true computes it tile by tile; use "
                f"gradients_in_forward: false"
            )


def _function(config: AlgorithmConfig, kind: str) -> Any:
    """Return a component's function with its parameters bound."""
    choice = getattr(config, kind)
    if isinstance(choice, CustomFunction):
        return CUSTOM_LOADERS[kind](choice)
    keys = COMPONENTS[kind][choice].parameters
    return partial(getattr(MODULES[kind], choice), **{key: getattr(config, key) for key in keys})


def _loss_traits(config: AlgorithmConfig, policy_loss: PolicyLoss) -> Component | custom_functions.LossTraits:
    """Return the declared traits of a built-in policy loss, or those found by trying a custom one."""
    if isinstance(config.policy_loss, CustomFunction):
        return custom_functions.loss_traits(policy_loss, has_reference=config.kl_in == "loss")
    return COMPONENTS["policy_loss"][config.policy_loss]


def _critic(config: AlgorithmConfig, *, value_clip: float) -> CriticFunctions:
    return CriticFunctions(
        returns=partial(gae_returns, gamma=config.gamma, gae_lambda=config.gae_lambda),
        loss=partial(clipped_value, value_clip=value_clip),
    )


def _loss_transforms(config: AlgorithmConfig, correction: Correction) -> list[LossTransform]:
    """Return the transforms to apply to the policy loss, in order."""
    transforms: list[LossTransform] = []
    if correction != "none":
        transforms.append(lambda loss, _: with_correction(loss, correction, cap=config.sampling_correction_cap))
    threshold = config.off_policy_mask_threshold
    if threshold is not None:
        transforms.append(lambda loss, _: regularizers.with_off_policy_mask(loss, threshold=threshold))
    if config.kl_in == "loss":
        kl = partial(
            regularizers.with_kl, estimator=KL_ESTIMATORS[str(config.kl_estimator)], unbiased=bool(config.kl_unbiased)
        )
        transforms.append(lambda loss, now: kl(loss, coefficient=now.kl))
    if has_entropy_bonus(config):
        transforms.append(lambda loss, now: regularizers.with_entropy_bonus(loss, coefficient=now.entropy))
    return transforms


def _composed(policy_loss: PolicyLoss, transforms: Sequence[LossTransform], now: Coefficients) -> PolicyLoss:
    for transform in transforms:
        policy_loss = transform(policy_loss, now)
    return policy_loss
