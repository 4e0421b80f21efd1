"""Metrics of scored groups. P prompts, G generations each."""

from collections.abc import Iterable, Sequence

import numpy as np

from cohort.metrics.turns import turn_metrics
from cohort.records import FloatArray, ScoredGroup, Trajectory


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, completion lengths and turns of one step's groups.

    `reward` is the mean over scored completions; `reward_std` the mean over groups of the unbiased standard deviation
    inside each; `frac_reward_zero_std` the share of groups whose rewards are all equal.
    """
    rewards_PG = np.stack([group.rewards for group in groups])
    scored_PG = ~np.isnan(rewards_PG)
    metrics = {
        "reward": _mean(rewards_PG[scored_PG]),
        "reward_std": float(np.mean([_std(group.rewards) for group in groups])),
        "frac_reward_zero_std": float(np.mean([has_equal_rewards(group) for group in groups])),
        "frac_unscored": float(1 - scored_PG.mean()),
    }
    for name in groups[0].reward_parts:
        part = np.concatenate([group.reward_parts[name] for group in groups])
        part = part[~np.isnan(part)]
        metrics[f"rewards/{name}/mean"] = _mean(part)
        metrics[f"rewards/{name}/std"] = float(part.std(ddof=1)) if len(part) > 1 else 0.0
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return metrics | _length_metrics(trajectories) | turn_metrics(trajectories)


def has_equal_rewards(group: ScoredGroup, *, parts: Iterable[str] = ()) -> bool:
    """Whether all scored rewards of a group are equal up to rounding, in total and for each of `parts`.

    Group-relative advantages are 0 then; others may not be (`gae`, `batch_mean_std`, and `per_reward_mean_std` if a
    part differs).
    """
    return all(map(has_equal_values, (group.rewards, *(group.reward_parts[name] for name in parts))))


def has_equal_values(values_G: FloatArray) -> bool:
    """Whether all scored values of a group are equal up to rounding."""
    return _std(values_G) < 1e-8


def _std(values_G: FloatArray) -> float:
    """Unbiased standard deviation of the scored values; 0 for fewer than two."""
    scored = values_G[~np.isnan(values_G)]
    return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0


def _length_metrics(sampled: Sequence[Trajectory]) -> dict[str, float]:
    trajectories = [trajectory for trajectory in sampled if not trajectory.is_broken]
    lengths = np.array([len(t.sampled_token_ids) for t in trajectories])
    stopped = np.array([t.end != "length" for t in trajectories], dtype=bool)
    metrics = {
        "completions/clipped_ratio": 1 - _mean(stopped),
        "completions/broken": float(len(sampled) - len(trajectories)),
    }
    for kind, values in (("", lengths), ("terminated_", lengths[stopped])):
        for statistic, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            metrics[f"completions/{statistic}_{kind}length"] = float(function(values)) if len(values) else 0.0
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
