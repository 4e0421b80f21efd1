"""Defaults and checks of the KL and entropy keys of the `algorithm` section."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.config.algorithm import AlgorithmConfig


def regularizer_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the keys that take effect, given the section's explicit values."""
    defaults: dict[str, Any] = {}
    if _is_positive(given.get("beta")):
        if given.get("kl_in", "loss") == "loss":
            defaults |= {"kl_estimator": "k3", "kl_in": "loss", "kl_unbiased": False}
        else:
            defaults["kl_estimator"] = "k1"
        if given.get("kl_target") is not None:
            defaults["kl_horizon"] = 10_000
    if given.get("entropy_target") is not None:
        defaults |= {"entropy_coef_delta": 0.005, "entropy_coef_max": 1.0}
    return defaults


def check_regularizers(algorithm: "AlgorithmConfig") -> None:
    """Reject keys without effect and misleading combinations.

    Raises:
        ValueError: names the key, the value and what works.
    """
    if algorithm.beta == 0:
        for key in ("kl_estimator", "kl_in", "kl_unbiased", "kl_target", "kl_horizon"):
            algorithm.refuse(key, "beta: 0", "remove it, or set beta above 0 (such as 0.04)")
    if algorithm.kl_in == "reward":
        algorithm.refuse("kl_unbiased", "kl_in: reward", "remove it, or use kl_in: loss")
    if algorithm.kl_target is None:
        algorithm.refuse("kl_horizon", "a fixed beta", "remove it, or set kl_target")
    if algorithm.entropy_target is None:
        for key in ("entropy_coef_delta", "entropy_coef_max"):
            algorithm.refuse(key, "a fixed entropy_coef", "remove it, or set entropy_target")
    if algorithm.entropy_coef_max is not None and algorithm.entropy_coef > algorithm.entropy_coef_max:
        raise ValueError(
            f"entropy_coef: {algorithm.entropy_coef} is above entropy_coef_max: {algorithm.entropy_coef_max}; lower "
            f"one or raise the other"
        )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1" and not algorithm.kl_unbiased:
        raise ValueError(
            "kl_estimator: k1 in the loss has a gradient of 0 in expectation, so it would only add noise; use "
            "kl_estimator: k2 or k3, kl_unbiased: true, or kl_in: reward"
        )
    if algorithm.kl_estimator == "k2" and algorithm.kl_unbiased:
        raise ValueError(
            "kl_unbiased: true with kl_estimator: k2 is the gradient of no divergence; use kl_estimator: k3, whose "
            "unbiased gradient is k2's times the importance ratio"
        )
    _check_components(algorithm)


def _check_components(algorithm: "AlgorithmConfig") -> None:
    """Reject regularizers that the chosen advantage or policy loss does not support."""
    parts, by_token = algorithm.components(), ""
    for part in parts:
        if algorithm.kl_in == "reward" and part.kl_in_reward_conflict is not None:
            raise ValueError(
                f"kl_in: reward does not go with advantage: {algorithm.advantage}: {part.kl_in_reward_conflict}; use "
                f"kl_in: loss, or another advantage such as group_mean_std"
            )
        if part.needs_critic or (part.uses_token_rewards and algorithm.kl_in == "reward"):
            by_token = f"advantage: {algorithm.advantage}" + ("" if part.needs_critic else " and kl_in: reward")
    if algorithm.top_entropy_quantile < 1:
        by_token = f"top_entropy_quantile: {algorithm.top_entropy_quantile}"
    if by_token and any(part.needs_uniform_advantage for part in parts):
        raise ValueError(
            f"policy_loss: {algorithm.policy_loss} has one ratio per completion and needs one advantage for all its "
            f"tokens, but with {by_token} they differ; use policy_loss: gspo_token"
        )


def _is_positive(value: Any) -> bool:
    """Whether a raw value is a number above 0; the field's own validation handles other text."""
    try:
        return value is not None and float(value) > 0
    except (TypeError, ValueError):
        return False
