"""Metrics of scored groups and of trajectories with turns. P prompts, G generations each."""

import math
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from cohort.records import BoolArray, EndReason, FloatArray, ScoredGroup, Trajectory, TurnStats

_EQUAL = 1e-8  # standard deviation of values that differ only by rounding


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tool calls, ends, masked tokens and times; empty for single completions.

    Broken trajectories count in the ends, the retries and the tool calls, not in the means.

    Args:
        trajectories: all trajectories of a step or an evaluation.
    """
    members = [(trajectory, trajectory.stats) for trajectory in trajectories if trajectory.stats is not None]
    if not members:
        return {}
    stats = [of_one for _, of_one in members]
    intact = [(trajectory, of_one) for trajectory, of_one in members if not trajectory.is_broken]
    metrics = {f"ends/{end}": _mean_or_nan([t.end == end for t, _ in members]) for end in get_args(EndReason)}
    metrics["turns/retries"] = float(sum(s.attempts - 1 for s in stats))
    if intact:
        turns = [len(trajectory.trained_calls) for trajectory, _ in intact]
        metrics |= {
            "turns/mean": _mean_or_nan(turns),
            "turns/max": float(max(turns)),
            "turns/model_calls": _mean_or_nan([len(t.calls) for t, _ in intact]),
            "turns/masked_tokens": _mean_or_nan([s.masked_tokens for _, s in intact]),
            "turns/model_s": _mean_or_nan([s.model_s for _, s in intact]),
            "turns/rewritten": _mean_or_nan([s.rewritten for _, s in intact]),
            "turns/environment_s": _mean_or_nan([s.environment_s for _, s in intact]),
        }
    return metrics | _tool_metrics(stats) | _environment_metrics([trajectory for trajectory, _ in intact])


def _tool_metrics(stats: Sequence[TurnStats]) -> dict[str, float]:
    calls, malformed = (sum(getattr(s, name) for s in stats) for name in ("tool_calls", "malformed_calls"))
    return {
        "tools/call_frequency": calls / len(stats),
        "tools/failure_frequency": sum(s.tool_errors for s in stats) / calls if calls else 0.0,
        "tools/malformed_ratio": malformed / (calls + malformed) if calls + malformed else 0.0,
    }


def _environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric over the trajectories that have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {
        f"environment/{name}": _mean_or_nan([t.metrics[name] for t in trajectories if name in t.metrics])
        for name in names
    }


def _mean_or_nan(values: Sequence[float]) -> float:
    return float(np.mean(values))


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, completion lengths and turns of one step's groups.

    `reward` is the mean over scored completions, `reward_min` and `reward_max` are the extremes; `reward_std` is the
    mean over groups of the unbiased standard deviation inside each; `frac_reward_zero_std` the share of groups whose
    rewards are all equal.
    """
    rewards_PG = np.stack([group.rewards for group in groups])
    scored_PG = ~np.isnan(rewards_PG)
    scored, stds_P = rewards_PG[scored_PG], np.array([_std(group.rewards) for group in groups])
    metrics = {
        "num_groups": float(len(groups)),
        "reward": _mean(scored),
        "reward_min": float(scored.min()) if len(scored) else math.nan,
        "reward_max": float(scored.max()) if len(scored) else math.nan,
        "reward_std": float(np.mean(stds_P)),
        "frac_reward_zero_std": float(np.mean(stds_P < _EQUAL)),
        "frac_unscored": float(1 - scored_PG.mean()),
    }
    for name in groups[0].reward_parts:
        part = np.concatenate([group.reward_parts[name] for group in groups])
        part = part[~np.isnan(part)]
        metrics[f"rewards/{name}/mean"] = _mean(part)
        metrics[f"rewards/{name}/std"] = float(part.std(ddof=1)) if len(part) > 1 else 0.0
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return metrics | _length_metrics(trajectories) | turn_metrics(trajectories)


def source_metrics(groups: Sequence[ScoredGroup], right_PG: BoolArray, *, column: str) -> dict[str, float]:
    """Reward, accuracy and length of the completions of each source of a mixture.

    Args:
        groups: scored groups.
        right_PG: which completions succeed.
        column: the column that says what source a row is of; without it there are no metrics.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if (name := group.prompt.columns.get(column)) is not None:
            members.setdefault(str(name), []).append(i)
    metrics: dict[str, float] = {}
    for name, indices in sorted(members.items()):
        own = [groups[i] for i in indices]
        intact = [[not t.is_broken for t in group.trajectories] for group in own]
        right = np.concatenate([right_PG[i][of_one] for i, of_one in zip(indices, intact, strict=True)])
        rewards = np.concatenate([group.rewards for group in own])
        lengths = [t.num_sampled_tokens for group in own for t in group.trajectories if not t.is_broken]
        metrics |= {
            f"sources/{name}/reward": _mean(rewards[~np.isnan(rewards)]),
            f"sources/{name}/accuracy": _mean(right),
            f"sources/{name}/mean_length": _mean(np.array(lengths)),
            f"sources/{name}/num_groups": float(len(own)),
        }
    return metrics


def has_equal_rewards(group: ScoredGroup, *, parts: Iterable[str] = ()) -> bool:
    """Whether all scored rewards of a group are equal up to rounding, in total and for each of `parts`.

    Group-relative advantages are 0 then; others may not be (`gae`, `batch_mean_std`, and `per_reward_mean_std` if a
    part differs).
    """
    return all(map(has_equal_values, (group.rewards, *(group.reward_parts[name] for name in parts))))


def has_equal_values(values_G: FloatArray) -> bool:
    """Whether all scored values of a group are equal up to rounding."""
    return _std(values_G) < _EQUAL


def _std(values_G: FloatArray) -> float:
    """Unbiased standard deviation of the scored values; 0 for fewer than two."""
    scored = values_G[~np.isnan(values_G)]
    return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0


def _length_metrics(sampled: Sequence[Trajectory]) -> dict[str, float]:
    trajectories = [trajectory for trajectory in sampled if not trajectory.is_broken]
    lengths = np.array([t.num_sampled_tokens for t in trajectories])
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
