"""Build the functions of an algorithm from the `algorithm` section. Branching on names ends here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from cohort.algorithms import advantages, losses, own, terms, weights
from cohort.algorithms.control import Control, as_metrics, coefficients, has_entropy_bonus, updated
from cohort.algorithms.correction import Correction, with_correction
from cohort.algorithms.critic import CriticFunctions, clipped_value, gae_returns
from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.terms import Coefficients, Estimator, Term
from cohort.batch import PolicyLoss
from cohort.config import COMPONENTS, AlgorithmConfig, Component, OwnFunction
from cohort.errors import UserError
from cohort.records import Estimate, FloatArray, IntArray

Advantage = Callable[[AdvantageInputs], Tensor]  # -> [P, G], or [P, G, L]
LossWeight = Callable[[IntArray, np.ndarray], FloatArray]  # lengths [N], included [N] -> weights [N]
MODULES = {"advantage": advantages, "policy_loss": losses, "loss_weight": weights}
OWN: dict[str, Callable[[OwnFunction], Any]] = {
    "advantage": own.own_advantage,
    "policy_loss": own.own_policy_loss,
    "loss_weight": own.own_loss_weight,
}
ESTIMATORS: dict[str, Estimator] = {"k1": terms.k1, "k2": terms.k2, "k3": terms.k3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Three pure functions, and what they need from the rest of the system."""

    advantage: Advantage
    loss_at: Callable[[Coefficients], PolicyLoss]  # the policy loss with its terms
    loss_weight: LossWeight
    critic: CriticFunctions | None  # None: no critic is trained
    mask_truncated: bool
    estimates: frozenset[Estimate]  # that it asks for before any sequence is trained on
    needs_reference: bool  # in the loss
    learns_without_advantage: bool  # the loss has terms that the advantage does not multiply
    sequence_level: bool  # a token's loss depends on the other tokens of its trajectory
    reward_kl: Estimator | None  # taken from the reward of each token, times its coefficient
    top_entropy_quantile: float  # share of the step's tokens that have a policy gradient
    first_control: Control  # of a run
    coefficients: Callable[[Control], Coefficients]
    as_metrics: Callable[[Coefficients], dict[str, float]]
    updated: Callable[[Control, Mapping[str, float], int], Control]  # by an update's metrics and its completions

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss with the coefficients that a run begins with."""
        return self.loss_at(self.coefficients(self.first_control))


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

    Raises:
        UserError: a function of the user's does not load, does not take its arguments, or breaks a rule.
    """
    parts = {kind: _function(config, kind) for kind in MODULES}
    if config.loss_weight == "constant":  # the one number that is another section's
        parts["loss_weight"] = partial(weights.constant, max_completion_tokens=max_completion_tokens)
    correction = auto_correction if config.sampling_correction == "auto" else config.sampling_correction
    traits = _loss_traits(config, parts["policy_loss"])
    kl_in_reward = config.kl_in == "reward"
    asks_for: dict[Estimate, bool] = {
        "logprobs": kl_in_reward,
        "reference_logprobs": kl_in_reward,
        "entropies": config.top_entropy_quantile < 1,
        "values": config.needs_critic,
    }
    return Algorithm(
        advantage=parts["advantage"],
        loss_at=partial(_composed, parts["policy_loss"], _terms(config, correction)),
        loss_weight=parts["loss_weight"],
        critic=_critic(config, value_clip=value_clip) if config.needs_critic else None,
        mask_truncated=config.mask_truncated_completions,
        estimates=frozenset(name for name, is_needed in asks_for.items() if is_needed),
        needs_reference=config.kl_in == "loss",
        learns_without_advantage=config.kl_in == "loss" or has_entropy_bonus(config) or traits.learns_without_advantage,
        sequence_level=traits.sequence_level
        or correction.startswith("sequence")
        or config.off_policy_mask_threshold is not None,
        reward_kl=ESTIMATORS[str(config.kl_estimator)] if kl_in_reward else None,
        top_entropy_quantile=config.top_entropy_quantile,
        first_control=Control(kl=config.beta, entropy=config.entropy_coef),
        coefficients=partial(coefficients, config),
        as_metrics=partial(as_metrics, config),
        updated=partial(updated, config),
    )


def check_own_functions(
    config: AlgorithmConfig, *, num_generations: int, num_rewards: int, gradients_in_forward: bool
) -> None:
    """Load and try the user's own functions, before anything that takes long.

    Args:
        config: the `algorithm` section.
        num_generations: completions of a prompt in the run.
        num_rewards: reward functions of the run.
        gradients_in_forward: `train.gradients_in_forward`.

    Raises:
        UserError: names the key, the function and the rule that it breaks.
    """
    if isinstance(config.advantage, OwnFunction):
        own.try_advantage(config.advantage, num_generations=num_generations, num_rewards=num_rewards)
    if isinstance(config.loss_weight, OwnFunction):
        own.try_loss_weight(config.loss_weight)
    if isinstance(config.policy_loss, OwnFunction):
        traits = own.try_policy_loss(config.policy_loss, has_reference=config.kl_in == "loss")
        if traits.sequence_level and gradients_in_forward:
            raise UserError(
                f"algorithm.policy_loss: {config.policy_loss.use!r}: a token's loss changes with the other tokens of "
                f"its completion, and train.gradients_in_forward: true computes it tile by tile; use "
                f"gradients_in_forward: false"
            )


def _function(config: AlgorithmConfig, kind: str) -> Any:
    """Return the function of a component with its parameters filled in."""
    choice = getattr(config, kind)
    if isinstance(choice, OwnFunction):
        return OWN[kind](choice)
    keys = COMPONENTS[kind][choice].parameters
    return partial(getattr(MODULES[kind], choice), **{key: getattr(config, key) for key in keys})


def _loss_traits(config: AlgorithmConfig, policy_loss: PolicyLoss) -> Component | own.LossTraits:
    """What a built-in loss declares, and what is found of a user's own by trying it."""
    if isinstance(config.policy_loss, OwnFunction):
        return own.loss_traits(policy_loss, has_reference=config.kl_in == "loss")
    return COMPONENTS["policy_loss"][config.policy_loss]


def _critic(config: AlgorithmConfig, *, value_clip: float) -> CriticFunctions:
    return CriticFunctions(
        returns=partial(gae_returns, gamma=config.gamma, gae_lambda=config.gae_lambda),
        loss=partial(clipped_value, value_clip=value_clip),
    )


def _terms(config: AlgorithmConfig, correction: Correction) -> list[Term]:
    """What is put around the policy loss, from the inside out."""
    found: list[Term] = []
    if correction != "none":
        found.append(lambda loss, _: with_correction(loss, correction, cap=config.sampling_correction_cap))
    threshold = config.off_policy_mask_threshold
    if threshold is not None:
        found.append(lambda loss, _: terms.with_off_policy_mask(loss, threshold=threshold))
    if config.kl_in == "loss":
        kl = partial(terms.with_kl, estimator=ESTIMATORS[str(config.kl_estimator)], unbiased=bool(config.kl_unbiased))
        found.append(lambda loss, now: kl(loss, coefficient=now.kl))
    if has_entropy_bonus(config):
        found.append(lambda loss, now: terms.with_entropy_bonus(loss, coefficient=now.entropy))
    return found


def _composed(policy_loss: PolicyLoss, around: Sequence[Term], now: Coefficients) -> PolicyLoss:
    for term in around:
        policy_loss = term(policy_loss, now)
    return policy_loss
