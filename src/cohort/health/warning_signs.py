"""Warning signs in the metrics of steps: one definition for the console's warnings and for the page's banner.

Plain functions over rows of metrics, without torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Metrics = Mapping[str, float]  # the training metrics of a step

WINDOW = 10  # steps that are compared, or in which a reward has to have no signal
LENGTH_COLLAPSE = 0.5  # of the length at the start
REWARD_RISE = 0.1  # of the largest absolute value that the reward had, and of its standard deviation
OUTWEIGHED = 100  # ratio of two rewards' spreads
MOST = 0.5  # share of tool calls or trajectories above which to warn
CUT_WINDOW = 3  # steps in which most completions have to be cut
_SLOW_S = 1.0  # seconds per trajectory above which to warn
_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShorterButHigher:
    """A reward that rose while completions became much shorter than at the start. Means of `WINDOW` steps."""

    value_before: float
    value: float
    length_before: float  # tokens
    length: float


def shorter_but_higher(
    first: Sequence[Metrics], last: Sequence[Metrics], name: str, weight: float
) -> ShorterButHigher | None:
    """Return how the reward and the lengths changed from the first steps to the last, if that is a warning sign."""
    length, length_before = (_mean(steps, "completions/mean_length") for steps in (last, first))
    value, value_before = (_mean(steps, f"rewards/{name}/mean") for steps in (last, first))
    rise = (value - value_before) * np.sign(weight)
    spread = max(_mean(steps, f"rewards/{name}/std") for steps in (last, first))
    is_higher = rise > 0 and rise >= REWARD_RISE * max(abs(value), abs(value_before), spread)
    if not (is_higher and length <= LENGTH_COLLAPSE * length_before):
        return None
    return ShorterButHigher(value_before=value_before, value=value, length_before=length_before, length=length)


def constant_reward(last: Sequence[Metrics], name: str) -> float | None:
    """Return the value that a reward had for every completion of these steps; None if it had several.

    None too if it scored only a minority of the completions.
    """
    if float(np.mean([metrics.get(f"rewards/{name}/frac_unscored", 0.0) for metrics in last])) > MOST:
        return None
    means = np.array([metrics[f"rewards/{name}/mean"] for metrics in last])
    stds = np.array([metrics[f"rewards/{name}/std"] for metrics in last])
    if np.isnan(means).any() or stds.max() > _TOLERANCE or np.ptp(means) > _TOLERANCE:
        return None
    return float(means[-1])


def outweighed(last: Sequence[Metrics], weights: Mapping[str, float]) -> tuple[str, str, float] | None:
    """Return the reward with the widest spread, the one with the narrowest, and their ratio if it is too large.

    Spreads are standard deviations times the weights, means of the steps that the reward scored; rewards that were
    constant have none.
    """
    spreads = {}
    for name, weight in weights.items():
        stds = [metrics[f"rewards/{name}/std"] for metrics in last if not math.isnan(metrics[f"rewards/{name}/mean"])]
        if stds and (spread := abs(weight) * float(np.mean(stds))) > _TOLERANCE:
            spreads[name] = spread
    if not spreads:
        return None
    widest, narrowest = max(spreads, key=spreads.__getitem__), min(spreads, key=spreads.__getitem__)
    ratio = spreads[widest] / spreads[narrowest]
    return (widest, narrowest, ratio) if ratio >= OUTWEIGHED else None


def all_groups_equal(last: Sequence[Metrics]) -> bool:
    """Whether all rewards of each group were equal in each of these steps."""
    return not any(metrics["frac_reward_zero_std"] < 1 for metrics in last)


def mostly_cut(last: Sequence[Metrics]) -> float | None:
    """Return the mean share of cut completions, if it is at least `MOST` in each of these steps."""
    shares = [metrics.get("completions/clipped_ratio", 0.0) for metrics in last]
    return float(np.mean(shares)) if all(share >= MOST for share in shares) else None


def turn_signs(metrics: Metrics, max_turns: int) -> dict[str, str]:
    """Return what goes wrong in turns, by metric: malformed or failing calls, the limit of turns, slow environments."""
    texts = {
        "tools/malformed_ratio": "of the tool calls cannot be parsed; `cohort rollout` shows what the model writes",
        "tools/failure_frequency": "of the tool calls fail; `cohort rollout` shows what the tools return",
        "ends/max_turns": f"of the trajectories end by rollout.max_turns: {max_turns}; raise it, or make the task end "
        "earlier",
    }
    signs = {name: f"{metrics[name]:.0%} {text}" for name, text in texts.items() if metrics.get(name, 0.0) > MOST}
    model_s, environment_s = (metrics.get(f"turns/{part}_s", 0.0) for part in ("model", "environment"))
    if environment_s > max(model_s, _SLOW_S):
        signs["turns/environment_s"] = (
            f"a trajectory spends {environment_s:.1f} s in tools and environments and {model_s:.1f} s in the model, so "
            f"environments limit the rollout's speed"
        )
    return signs


def logprob_tolerance(*, has_bfloat16: bool) -> float:
    """Largest difference of a logprob between batches of different shape that rounding explains, in nats."""
    return 0.3 if has_bfloat16 else 1e-3


def logprobs_are_comparable(rollout: Mapping[str, float], metrics: Metrics) -> bool:
    """Whether the sampler's and the trainer's logprobs should agree in this step.

    Top-p and top-k (of the section `rollout`) change the sampler's distribution, and older weights sampled stale
    completions.
    """
    is_whole = rollout.get("top_p", 1.0) >= 1 and rollout.get("top_k", 0) <= 0
    return is_whole and not metrics.get("rollout/staleness_max", 0.0) > 0


def _mean(steps: Sequence[Metrics], key: str) -> float:
    return float(np.mean([metrics[key] for metrics in steps]))
