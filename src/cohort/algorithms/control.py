"""Coefficients that adapt to what the updates measure. Rank 0's: the others are told with every command."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cohort.algorithms.terms import Coefficients
from cohort.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Where the coefficients stand between two updates; saved with the run."""

    kl: float
    entropy: float
    last_entropy: float | None = None  # in nats, of the last update that measured it


def adapted_kl(coefficient: float, kl: float, *, target: float, horizon: int, num_completions: int) -> float:
    """Proportional control (Ziegler et al., arXiv:1909.08593, section 2.2), with the error bounded to a fifth.

    Args:
        coefficient: beta before the update.
        kl: per token, as the update has measured it.
        target: of it.
        horizon: completions over which an error of 1 would double beta.
        num_completions: of the update.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_completions / horizon)


def adapted_entropy(coefficient: float, entropy: float, *, target: float, delta: float, largest: float) -> float:
    """Up by delta where the entropy is at most the target, else down, between 0 and `largest` (arXiv:2505.22312)."""
    return min(max(coefficient + (delta if entropy <= target else -delta), 0.0), largest)


def coefficients(config: AlgorithmConfig, control: Control) -> Coefficients:
    """The weights of the terms in the next update.

    An adaptive entropy bonus is there only while the last measured entropy is at most its target, so not in the first.
    """
    target, last = config.entropy_target, control.last_entropy
    is_there = target is None or (last is not None and last <= target)
    return Coefficients(kl=control.kl, entropy=control.entropy if is_there else 0.0)


def as_metrics(config: AlgorithmConfig, now: Coefficients) -> dict[str, float]:
    """The coefficients of the terms that there are."""
    metrics = {"kl_coef": now.kl} if config.beta > 0 else {}
    return metrics | ({"entropy_coef": now.entropy} if has_entropy_bonus(config) else {})


def has_entropy_bonus(config: AlgorithmConfig) -> bool:
    """Whether there ever is one."""
    return config.entropy_coef > 0 or config.entropy_target is not None


def updated(config: AlgorithmConfig, control: Control, metrics: Mapping[str, float], num_completions: int) -> Control:
    """The coefficients after an update.

    Args:
        config: the `algorithm` section.
        control: before it.
        metrics: `kl` and `entropy` as it has measured them; what is not there stays as it was.
        num_completions: of the update.
    """
    if config.kl_target is not None and "kl" in metrics:
        assert config.kl_horizon is not None, "filled in with kl_target"
        kl = adapted_kl(
            control.kl,
            metrics["kl"],
            target=config.kl_target,
            horizon=config.kl_horizon,
            num_completions=num_completions,
        )
        control = replace(control, kl=kl)
    if config.entropy_target is not None and "entropy" in metrics:
        assert config.entropy_coef_delta is not None, "filled in with entropy_target"
        assert config.entropy_coef_max is not None, "filled in with entropy_target"
        entropy = adapted_entropy(
            control.entropy,
            metrics["entropy"],
            target=config.entropy_target,
            delta=config.entropy_coef_delta,
            largest=config.entropy_coef_max,
        )
        control = replace(control, entropy=entropy, last_entropy=metrics["entropy"])
    return control
