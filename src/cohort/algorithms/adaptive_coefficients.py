"""Adaptive KL and entropy coefficients. They live on rank 0, which sends them to the other ranks with every update."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cohort.algorithms.regularizers import Coefficients
from cohort.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientState:
    """State of the adaptive coefficients between updates; saved in checkpoints."""

    kl: float
    entropy: float
    last_entropy: float | None = None  # nats, as last measured


def adapted_kl(coefficient: float, kl: float, *, target: float, horizon: int, num_completions: int) -> float:
    """Proportional controller of beta (Ziegler et al., arXiv:1909.08593, section 2.2), with the error clipped to 0.2.

    Args:
        coefficient: beta before the update.
        kl: mean KL per token, as measured by the update.
        target: target KL.
        horizon: completions over which an error of 1 would double beta.
        num_completions: completions in the update.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_completions / horizon)


def adapted_entropy(coefficient: float, entropy: float, *, target: float, delta: float, largest: float) -> float:
    """Add delta if the entropy is at most the target, else subtract it; clipped to [0, largest] (arXiv:2505.22312)."""
    return min(max(coefficient + (delta if entropy <= target else -delta), 0.0), largest)


def coefficients(config: AlgorithmConfig, state: CoefficientState) -> Coefficients:
    """Return the coefficients of the next update.

    An adaptive entropy bonus applies only while the last measured entropy is at most the target, so never in the first
    update.
    """
    target, last = config.entropy_target, state.last_entropy
    is_active = target is None or (last is not None and last <= target)
    return Coefficients(kl=state.kl, entropy=state.entropy if is_active else 0.0)


def coefficient_metrics(config: AlgorithmConfig, now: Coefficients) -> dict[str, float]:
    """Return the coefficients of the active regularizers as metrics."""
    metrics = {"kl_coef": now.kl} if config.beta > 0 else {}
    return metrics | ({"entropy_coef": now.entropy} if has_entropy_bonus(config) else {})


def has_entropy_bonus(config: AlgorithmConfig) -> bool:
    """Whether the loss can have an entropy bonus."""
    return config.entropy_coef > 0 or config.entropy_target is not None


def update_coefficients(
    config: AlgorithmConfig, state: CoefficientState, metrics: Mapping[str, float], num_completions: int
) -> CoefficientState:
    """Return the state after an update.

    Args:
        config: the `algorithm` section.
        state: state before the update.
        metrics: `kl` and `entropy` as measured by the update; a missing one leaves its coefficient unchanged.
        num_completions: completions in the update.
    """
    if config.kl_target is not None and "kl" in metrics:
        assert config.kl_horizon is not None, "filled in with kl_target"
        kl = adapted_kl(
            state.kl,
            metrics["kl"],
            target=config.kl_target,
            horizon=config.kl_horizon,
            num_completions=num_completions,
        )
        state = replace(state, kl=kl)
    if config.entropy_target is not None and "entropy" in metrics:
        assert config.entropy_coef_delta is not None, "filled in with entropy_target"
        assert config.entropy_coef_max is not None, "filled in with entropy_target"
        entropy = adapted_entropy(
            state.entropy,
            metrics["entropy"],
            target=config.entropy_target,
            delta=config.entropy_coef_delta,
            largest=config.entropy_coef_max,
        )
        state = replace(state, entropy=entropy, last_entropy=metrics["entropy"])
    return state
