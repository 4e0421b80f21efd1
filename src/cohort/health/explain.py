"""Why a step learned something, or nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.health.facts import facts_of
from cohort.health.findings import Level, number_text
from cohort.health.history import History
from cohort.health.metrics_table import MetricsTable

_TRAINED = "completions/trained_ratio"
_TOLERANCE = 1e-8
_FEW = 0.25  # share of groups with a signal below which a step learned little


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a step learned something, or nothing."""

    level: Level  # a warning: it learned nothing; information: little, or nothing is known
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSummary:
    """A step's groups in a few numbers. Broken completions count in `num_rows` and `num_broken` only."""

    num_groups: int
    num_equal: int  # groups whose scored rewards are all equal
    num_rows: int
    num_scored: int  # completions with a reward
    num_broken: int
    reward_min: float | None
    reward_max: float | None


def maximum_reward(table: MetricsTable, config: Mapping[str, Any] | None) -> float | None:
    """Return the largest possible reward of a run; None if it is not known."""
    return History(table, facts_of(config)).maximum_reward


def explain_step(
    row: Mapping[str, float],
    groups: GroupsSummary | None,
    step: int,
    *,
    max_reward: float | None = None,
    critic_warmup_steps: int = 0,
) -> Explanation | None:
    """Say whether a step learned something, and why not.

    Args:
        row: the step's training metrics; missing ones count as unknown.
        groups: the step's groups in a few numbers, if its completions are kept.
        step: its number.
        max_reward: the largest possible reward, which tells "all right" from "all equal".
        critic_warmup_steps: first steps of the run in which only the critic is trained.

    Returns:
        None if neither metrics nor groups are known.
    """
    if not row and groups is None:
        return None
    seen = _Step(step, row, groups, max_reward, critic_warmup_steps)
    reason = _no_rewards(seen) or _no_update(seen) or _no_advantages(seen) or _no_gradient(seen)
    if reason is None:
        return _learned(seen)
    return Explanation(level="warning", text=f"Step {step} learned nothing: {reason}")


@dataclass(frozen=True, slots=True)
class _Step:
    """The metrics of a step and its groups, with the pieces that sentences are made of."""

    number: int
    metrics: Mapping[str, float]
    groups: GroupsSummary | None
    max_reward: float | None
    critic_warmup_steps: int

    def get(self, name: str) -> float:
        """A metric; NaN if it is missing."""
        value = self.metrics.get(name)
        return math.nan if value is None else float(value)

    @property
    def num_groups(self) -> int:
        """Number of groups; 0 if it is not known."""
        found = float(self.groups.num_groups) if self.groups is not None else self.get("num_groups")
        return 0 if math.isnan(found) else int(found)

    @property
    def equal_share(self) -> float:
        """Share of groups with equal rewards; NaN if it is not known."""
        share = self.get("frac_reward_zero_std")
        if math.isnan(share) and self.groups is not None and self.groups.num_groups:
            return self.groups.num_equal / self.groups.num_groups
        return min(max(share, 0.0), 1.0) if math.isfinite(share) else math.nan

    @property
    def has_zero_gradient(self) -> bool:
        """Whether the step's metrics say that its gradient is 0."""
        return self.get(_TRAINED) == 0 or self.get("grad_norm") == 0


def _no_rewards(s: _Step) -> str | None:
    groups = s.groups
    if groups is not None and 0 < groups.num_rows == groups.num_broken:
        num = groups.num_rows
        return f"all {num} trajectories broke (they timed out or their environment failed), so none has a reward"
    if s.get("frac_unscored") >= 1 or (groups is not None and groups.num_rows > 0 and groups.num_scored == 0):
        return "no reward scored any of its completions, so there are no advantages"
    return None


def _no_update(s: _Step) -> str | None:
    rate = s.get("learning_rate")
    if not math.isnan(rate) and not math.isfinite(s.get("grad_norm")):
        return "its gradient norm is not a number, so the update was not made"
    if rate == 0:
        if s.number <= s.critic_warmup_steps:
            return f"only the critic is trained in the first {s.critic_warmup_steps} steps (critic.warmup_steps)"
        return "its learning rate is 0"
    return None


def _no_advantages(s: _Step) -> str | None:
    """All groups have equal rewards, and nothing else made a gradient; or none is left."""
    if s.equal_share >= 1 and not s.get("grad_norm") > 0:
        return f"{_what_is_equal(s)}, so every advantage is 0"
    if (s.groups is not None and s.groups.num_rows > 0) or not s.has_zero_gradient:
        return None
    stale, dropped = (max(s.get(f"rollout/{name}"), 0.0) for name in ("stale_dropped", "dropped_groups"))
    if stale > 0 and not dropped > stale:
        return f"{stale:.0f} of its groups were dropped because they were older than rollout.max_staleness"
    if dropped > 0:
        return f"{dropped:.0f} of its groups were dropped because fewer than two of their trajectories worked"
    return None


def _what_is_equal(s: _Step) -> str:
    """Say of all groups that they are right, wrong, or have equal rewards."""
    low, high = s.get("reward_min"), s.get("reward_max")
    if s.groups is not None and s.groups.reward_min is not None and s.groups.reward_max is not None:
        low, high = s.groups.reward_min, s.groups.reward_max
    groups = f"all {s.num_groups} groups" if s.num_groups else "all groups"
    if abs(low) <= _TOLERANCE and abs(high) <= _TOLERANCE:
        return f"every completion in {groups} is wrong (reward 0)"
    if s.max_reward is not None and low >= s.max_reward - _TOLERANCE:
        return f"every completion in {groups} is right (reward {number_text(high)}, the maximum)"
    between = f", from {number_text(low)} to {number_text(high)}" if high - low > _TOLERANCE else ""
    return f"{groups} have equal rewards within the group{between}"


def _no_gradient(s: _Step) -> str | None:
    if s.get("sampling/off_policy_masked_ratio") >= 1:
        why = "the policy moved too far from the sampler"
        return f"all its tokens are masked by algorithm.off_policy_mask_threshold: {why}"
    if s.get("clip_ratio/region_mean") >= 1 and s.get("grad_norm") == 0:
        return "all its tokens are clipped, so their gradient is 0: the ratios left the clip range"
    if s.get(_TRAINED) == 0:
        if s.get("completions/clipped_ratio") >= 1:
            return "all its completions hit the token limit, and none has a gradient"
        return "none of its completions has a gradient: their advantages are 0, or their tokens are masked"
    return "its gradient is 0" if s.has_zero_gradient else None


def _learned(s: _Step) -> Explanation:
    share, norm = 1 - s.equal_share, s.get("grad_norm")
    if math.isnan(share) and math.isnan(norm):
        return Explanation(level="info", text=f"Step {s.number}: its metrics are missing, so nothing is known")
    num = s.num_groups
    of_groups = f"{round(share * num)} of {num} groups" if num else f"{share:.0%} of the groups"
    if math.isnan(share):
        what = "was trained on"
    elif share <= 0:
        what = "learned without differences of rewards within groups"
    elif share < _FEW:
        what = f"learned little: only {of_groups} have different rewards"
    else:
        what = f"learned from {of_groups}, those with different rewards" if share < 1 else "learned from all its groups"
    text = f"Step {s.number} {what}"
    if not math.isnan(norm):
        text += f"; the gradient norm is {number_text(norm)}"
    return Explanation(level="good" if share >= _FEW else "info", text=text)
