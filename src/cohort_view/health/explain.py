"""Why a step learned something, or nothing."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from cohort_view.records import Explanation, Fact, GroupsSummary
from cohort_view.values import number_text

_TOLERANCE = 1e-8
_FEW = 0.25  # share of groups with a signal below which a step learned little


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
    def equal_share(self) -> float:
        """Share of groups with equal rewards; NaN if it is not known."""
        share = self.get("frac_reward_zero_std")
        if math.isnan(share) and self.groups is not None and self.groups.num_groups:
            return self.groups.num_equal / self.groups.num_groups
        return min(max(share, 0.0), 1.0) if math.isfinite(share) else math.nan

    def fact(self, text: str, metric: str, *, sort: str | None = None) -> Fact:
        """A fact with its metric's value, linked to the step's groups sorted by `sort`, or to the metric's curve."""
        value = self.get(metric)
        return Fact(text=text, metric=metric, value=None if math.isnan(value) else value, link=self._link(metric, sort))

    def _link(self, metric: str, sort: str | None) -> str | None:
        if self.run_id is None:
            return None
        run = f"#/run/{quote(self.run_id, safe='')}"
        return f"{run}/step/{self.number}?sort={sort}" if sort else f"{run}/curves?names={quote(metric, safe='/@')}"


_Reason = Callable[[_Step], Explanation | None]


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
    for reason in _REASONS:
        found = reason(seen)
        if found is not None:
            return found
    return _learned(seen)


def _all_broken(s: _Step) -> Explanation | None:
    if s.groups is None or not 0 < s.groups.num_rows == s.groups.num_broken:
        return None
    num = s.groups.num_rows
    text = f"all {num} trajectories broke (they timed out or their environment failed), so none has a reward"
    return _nothing(s, text, s.fact(f"{num} of {num} trajectories broke", "completions/broken", sort="order"))


def _all_unscored(s: _Step) -> Explanation | None:
    is_unscored = s.groups is not None and s.groups.num_rows > 0 and s.groups.num_scored == 0
    if not (s.get("frac_unscored") >= 1 or is_unscored):
        return None
    text = "no reward scored any of its completions, so there are no advantages"
    return _nothing(s, text, s.fact("100% of the completions are unscored", "frac_unscored", sort="order"))


def _not_finite(s: _Step) -> Explanation | None:
    if math.isnan(s.get("learning_rate")) or math.isfinite(s.get("grad_norm")):
        return None
    text = "its gradient norm is not a number, so the update was not made"
    return _nothing(s, text, s.fact("The gradient norm is not a number", "grad_norm"))


def _learning_rate_zero(s: _Step) -> Explanation | None:
    if s.get("learning_rate") != 0:
        return None
    text = "its learning rate is 0"
    if s.number <= s.critic_warmup_steps:
        text = f"only the critic is trained in the first {s.critic_warmup_steps} steps (critic.warmup_steps)"
    return _nothing(s, text, s.fact("The learning rate is 0", "learning_rate"))


def _equal_rewards(s: _Step) -> Explanation | None:
    """All groups have equal rewards, and nothing else made a gradient."""
    share = s.equal_share
    if not share >= 1 or s.get("grad_norm") > 0:
        return None
    facts = [s.fact("100% of the groups have equal rewards", "frac_reward_zero_std", sort="equal")]
    if not math.isnan(s.get("reward")):
        facts.append(s.fact(f"The mean reward is {number_text(s.get('reward'))}", "reward", sort="reward"))
    return _nothing(s, f"{_what_is_equal(s)}, so every advantage is 0", *facts, *_zero_gradient_facts(s))


def _what_is_equal(s: _Step) -> str:
    """Say of all groups that they are right, wrong, or have equal rewards."""
    low = high = s.get("reward")
    if s.groups is not None and s.groups.reward_min is not None and s.groups.reward_max is not None:
        low, high = s.groups.reward_min, s.groups.reward_max
    elif s.get("reward_std") > _TOLERANCE or s.max_reward is None or _TOLERANCE < low < s.max_reward - _TOLERANCE:
        low, high = math.nan, math.nan  # a mean says nothing about the groups, unless it is the lowest or the highest
    groups = f"all {s.groups.num_groups} groups" if s.groups is not None else "all groups"
    if abs(low) <= _TOLERANCE and abs(high) <= _TOLERANCE:
        return f"every completion in {groups} is wrong (reward 0)"
    if s.max_reward is not None and low >= s.max_reward - _TOLERANCE:
        return f"every completion in {groups} is right (reward {number_text(high)}, the maximum)"
    between = f", from {number_text(low)} to {number_text(high)}" if high - low > _TOLERANCE else ""
    return f"{groups} have equal rewards within the group{between}"


def _dropped(s: _Step) -> Explanation | None:
    stale, dropped = s.get("rollout/stale_dropped"), s.get("rollout/dropped_groups")
    has_rows = s.groups is not None and s.groups.num_rows > 0
    if has_rows or not (s.get("completions/trained_ratio") == 0 or s.get("grad_norm") == 0):
        return None
    if stale > 0 and stale >= (0 if math.isnan(dropped) else dropped):
        text = f"{stale:.0f} of its groups were dropped because they were older than rollout.max_staleness"
        return _nothing(s, text, s.fact(f"{stale:.0f} groups were too old", "rollout/stale_dropped"))
    if dropped > 0:
        text = f"{dropped:.0f} of its groups were dropped because fewer than two of their trajectories worked"
        return _nothing(s, text, s.fact(f"{dropped:.0f} groups were dropped", "rollout/dropped_groups"))
    return None


def _all_masked(s: _Step) -> Explanation | None:
    share = s.get("sampling/off_policy_masked_ratio")
    if not share >= 1:
        return None
    text = "all its tokens are masked by algorithm.off_policy_mask_threshold: the policy moved too far from the sampler"
    return _nothing(s, text, s.fact("100% of the trained tokens are masked", "sampling/off_policy_masked_ratio"))


def _all_clipped(s: _Step) -> Explanation | None:
    share = s.get("clip_ratio/region_mean")
    if not (share >= 1 and s.get("grad_norm") == 0):
        return None
    text = "all its tokens are clipped, so their gradient is 0: the ratios left the clip range"
    return _nothing(s, text, s.fact("100% of the trained tokens are clipped", "clip_ratio/region_mean"))


def _no_gradient(s: _Step) -> Explanation | None:
    """The gradient is 0 for a reason that the metrics only hint at."""
    trained = s.get("completions/trained_ratio")
    if not (s.get("grad_norm") == 0 or trained == 0):
        return None
    if trained == 0:
        text = "none of its completions has a gradient: their advantages are 0, or their tokens are masked"
        if s.get("completions/clipped_ratio") >= 1:
            text = "all its completions hit the token limit, and none has a gradient"
    else:
        text = "its gradient is 0"
    return _nothing(s, text, *_zero_gradient_facts(s), s.fact(_equal_share(s), "frac_reward_zero_std", sort="equal"))


def _learned(s: _Step) -> Explanation:
    share, norm = 1 - s.equal_share, s.get("grad_norm")
    if math.isnan(share) and math.isnan(norm):
        return Explanation(learned=True, text=f"Step {s.number}: its metrics are missing, so nothing is known")
    num = s.groups.num_groups if s.groups is not None else 0
    of_groups = f"{round(share * num)} of {num} groups" if num else f"{share:.0%} of the groups"
    if share <= 0:
        what = "learned without differences of rewards within groups"
    elif share < _FEW:
        what = f"learned little: only {of_groups} have different rewards"
    else:
        what = f"learned from {of_groups}, those with different rewards" if share < 1 else "learned from all its groups"
    facts = [s.fact(_equal_share(s), "frac_reward_zero_std", sort="equal")]
    text = f"Step {s.number} {what}"
    if not math.isnan(norm):
        text += f"; the gradient norm is {number_text(norm)}"
        facts.append(s.fact(f"Gradient norm {number_text(norm)} before clipping", "grad_norm"))
    if s.get("completions/trained_ratio") >= 0:
        trained = s.get("completions/trained_ratio")
        facts.append(s.fact(f"{trained:.0%} of the completions have a gradient", "completions/trained_ratio"))
    if s.get("learning_rate") > 0:
        facts.append(s.fact(f"Learning rate {number_text(s.get('learning_rate'))}", "learning_rate"))
    return Explanation(learned=True, text=text, facts=tuple(facts))


def _zero_gradient_facts(s: _Step) -> list[Fact]:
    facts = []
    if s.get("completions/trained_ratio") == 0:
        facts.append(s.fact("0% of the completions have a gradient", "completions/trained_ratio"))
    if s.get("grad_norm") == 0:
        facts.append(s.fact("The gradient norm is 0", "grad_norm"))
    return facts


def _equal_share(s: _Step) -> str:
    if math.isnan(s.equal_share):
        return "It is not known how many groups have equal rewards"
    return f"{s.equal_share:.0%} of the groups have equal rewards"


def _nothing(s: _Step, text: str, *facts: Fact) -> Explanation:
    return Explanation(learned=False, text=f"Step {s.number} learned nothing: {text}", facts=facts)


_REASONS: tuple[_Reason, ...] = (
    _all_broken,
    _all_unscored,
    _not_finite,
    _learning_rate_zero,
    _equal_rewards,
    _dropped,
    _all_masked,
    _all_clipped,
    _no_gradient,
)
