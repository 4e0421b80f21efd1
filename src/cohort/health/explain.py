"""Why a step learned something, or nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cohort.health.facts import facts_of
from cohort.health.findings import Level, number_text
from cohort.health.history import History
from cohort.health.metrics_table import MetricsTable

_TRAINED = "completions/trained_ratio"
_TOLERANCE = 1e-8
_FEW = 0.25  # share of groups with a signal below which a step learned little


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact that an explanation rests on."""

    text: str
    metric: str | None = None
    value: float | None = None
    link: str | None = None  # within the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a step learned something, or nothing."""

    level: Level  # a warning: it learned nothing; information: little, or nothing is known
    text: str
    facts: Sequence[Fact] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSummary:
    """A step's groups in a few numbers. Broken completions count in `num_rows` and `num_broken` only."""

    num_groups: int
    num_equal: int  # groups whose scored rewards are all equal
    num_rows: int
    num_scored: int  # completions with a reward
    num_broken: int
    num_clipped: int  # completions that hit the token limit
    num_zero_advantage: int | None  # completions whose advantage is 0; None if the file has no advantages
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
    run_id: str | None = None,
    max_reward: float | None = None,
    critic_warmup_steps: int = 0,
) -> Explanation | None:
    """Say whether a step learned something, and why not.

    Args:
        row: the step's training metrics; missing ones count as unknown.
        groups: the step's groups in a few numbers, if its completions are kept.
        step: its number.
        run_id: makes links to the evidence.
        max_reward: the largest possible reward, which tells "all right" from "all equal".
        critic_warmup_steps: first steps of the run in which only the critic is trained.

    Returns:
        None if neither metrics nor groups are known.
    """
    if not row and groups is None:
        return None
    seen = _Step(step, row, groups, max_reward, run_id, critic_warmup_steps)
    reason = _no_rewards(seen) or _no_update(seen) or _no_advantages(seen) or _no_gradient(seen)
    if reason is None:
        return _learned(seen)
    why, facts = reason
    return Explanation(level="warning", text=f"Step {step} learned nothing: {why}", facts=facts)


_Reason = tuple[str, list[Fact]]  # why, with what shows it


@dataclass(frozen=True, slots=True)
class _Step:
    """The metrics of a step and its groups, with the pieces that sentences are made of."""

    number: int
    metrics: Mapping[str, float]
    groups: GroupsSummary | None
    max_reward: float | None
    run_id: str | None
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

    def fact(self, text: str, metric: str, *, sort: str | None = None) -> Fact:
        """A fact with its metric's value, linked to the step's groups sorted by `sort`, or to the metric's curve."""
        value, link = self.get(metric), None
        if self.run_id is not None:
            place = f"/steps/{self.number}?sort={sort}" if sort else f"?names={quote(metric, safe='/@')}"
            link = f"#/run/{quote(self.run_id, safe='')}{place}"
        return Fact(text=text, metric=metric, value=None if math.isnan(value) else value, link=link)

    def equal_fact(self) -> Fact:
        """How many groups have equal rewards."""
        share = self.equal_share
        text = "It is not known how many groups have equal rewards"
        if not math.isnan(share):
            text = f"{share:.0%} of the groups have equal rewards"
        right, wrong = self.get("frac_all_right"), self.get("frac_all_wrong")
        if not math.isnan(right):
            text += f" ({right:.0%} are all right, {wrong:.0%} all wrong)"
        return self.fact(text, "frac_reward_zero_std", sort="equal")

    def zero_facts(self) -> list[Fact]:
        """What of the gradient is 0."""
        texts = {
            _TRAINED: "0% of the completions have a gradient",
            "grad_norm": "The gradient norm is 0",
        }
        return [self.fact(text, metric) for metric, text in texts.items() if self.get(metric) == 0]


def _no_rewards(s: _Step) -> _Reason | None:
    groups = s.groups
    if groups is not None and 0 < groups.num_rows == groups.num_broken:
        num = groups.num_rows
        why = f"all {num} trajectories broke (they timed out or their environment failed), so none has a reward"
        return why, [s.fact(f"{num} of {num} trajectories broke", "completions/broken", sort="order")]
    if s.get("frac_unscored") >= 1 or (groups is not None and groups.num_rows > 0 and groups.num_scored == 0):
        fact = s.fact("100% of the completions are unscored", "frac_unscored", sort="order")
        return "no reward scored any of its completions, so there are no advantages", [fact]
    return None


def _no_update(s: _Step) -> _Reason | None:
    rate = s.get("learning_rate")
    if not math.isnan(rate) and not math.isfinite(s.get("grad_norm")):
        fact = s.fact("The gradient norm is not a number", "grad_norm")
        return "its gradient norm is not a number, so the update was not made", [fact]
    if rate == 0:
        why = "its learning rate is 0"
        if s.number <= s.critic_warmup_steps:
            why = f"only the critic is trained in the first {s.critic_warmup_steps} steps (critic.warmup_steps)"
        return why, [s.fact("The learning rate is 0", "learning_rate")]
    return None


def _no_advantages(s: _Step) -> _Reason | None:
    """All groups have equal rewards, and nothing else made a gradient; or none is left."""
    if s.equal_share >= 1 and not s.get("grad_norm") > 0:
        facts = [s.equal_fact()]
        if not math.isnan(s.get("reward")):
            facts.append(s.fact(f"The mean reward is {number_text(s.get('reward'))}", "reward", sort="reward"))
        return f"{_what_is_equal(s)}, so every advantage is 0", facts + s.zero_facts()
    if (s.groups is not None and s.groups.num_rows > 0) or not s.zero_facts():
        return None
    stale, dropped = (max(s.get(f"rollout/{name}"), 0.0) for name in ("stale_dropped", "dropped_groups"))
    if stale > 0 and not dropped > stale:
        why = f"{stale:.0f} of its groups were dropped because they were older than rollout.max_staleness"
        return why, [s.fact(f"{stale:.0f} groups were too old", "rollout/stale_dropped")]
    if dropped > 0:
        why = f"{dropped:.0f} of its groups were dropped because fewer than two of their trajectories worked"
        return why, [s.fact(f"{dropped:.0f} groups were dropped", "rollout/dropped_groups")]
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


def _no_gradient(s: _Step) -> _Reason | None:
    if s.get("sampling/off_policy_masked_ratio") >= 1:
        why = "all its tokens are masked by algorithm.off_policy_mask_threshold: the policy moved too far from the "
        return f"{why}sampler", [s.fact("100% of the trained tokens are masked", "sampling/off_policy_masked_ratio")]
    if s.get("clip_ratio/region_mean") >= 1 and s.get("grad_norm") == 0:
        fact = s.fact("100% of the trained tokens are clipped", "clip_ratio/region_mean")
        return "all its tokens are clipped, so their gradient is 0: the ratios left the clip range", [fact]
    if not s.zero_facts():
        return None
    why = "its gradient is 0"
    if s.get(_TRAINED) == 0:
        why = "none of its completions has a gradient: their advantages are 0, or their tokens are masked"
        if s.get("completions/clipped_ratio") >= 1:
            why = "all its completions hit the token limit, and none has a gradient"
    return why, [*s.zero_facts(), s.equal_fact()]


def _learned(s: _Step) -> Explanation:
    share, norm, trained, rate = 1 - s.equal_share, s.get("grad_norm"), s.get(_TRAINED), s.get("learning_rate")
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
    facts, text = [s.equal_fact()], f"Step {s.number} {what}"
    if not math.isnan(norm):
        text += f"; the gradient norm is {number_text(norm)}"
        facts.append(s.fact(f"Gradient norm {number_text(norm)} before clipping", "grad_norm"))
    if trained >= 0:
        facts.append(s.fact(f"{trained:.0%} of the completions have a gradient", _TRAINED))
    if rate > 0:
        facts.append(s.fact(f"Learning rate {number_text(rate)}", "learning_rate"))
    return Explanation(level="good" if share >= _FEW else "info", text=text, facts=facts)
