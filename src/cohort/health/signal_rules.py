"""Conditions on the learning signal: equal rewards, rewards that can be gamed, completions without a reward."""

from collections.abc import Iterator

import numpy as np

from cohort.health.findings import Level, Sign, number_text
from cohort.health.history import WINDOW, Condition, History

MOST = 0.5  # share above which a warning is due
FEW_STEPS = 3  # before which nothing is a sign of a missing signal
RISE = 0.1  # of a reward's size and of its standard deviation
_NO_SIGNAL, _LITTLE_SIGNAL = 0.9, 0.7  # share of groups with equal rewards
COLLAPSE = 0.5  # of the length at the start
_OUTWEIGHED = 100  # ratio of two rewards' spreads
_SLOW_S = 1.0  # seconds per trajectory that an environment may take
_TOLERANCE = 1e-8


def all_equal(h: History) -> Iterator[Sign]:
    """Every completion of the recent steps has the same reward."""
    rewards, num = h.recent("reward"), len(h.recent("reward"))
    if num < FEW_STEPS or np.ptp(rewards) > _TOLERANCE or h.recent_mean("reward_std") > _TOLERANCE:
        return
    if h.recent_mean("frac_reward_zero_std") >= 1:
        value = float(rewards[-1])
        yield Sign("bad" if num >= WINDOW else "warning", value=value, reward=number_text(value), num=num)


def all_zero(h: History) -> Iterator[Sign]:
    """Every completion has reward 0."""
    return (sign for sign in h.signs(all_equal) if abs(sign.values["value"]) <= _TOLERANCE)


def all_maximum(h: History) -> Iterator[Sign]:
    """Every completion has the largest possible reward."""
    maximum = h.maximum_reward
    for sign in h.signs(all_equal):
        if maximum is not None and abs(sign.values["value"] - maximum) <= _TOLERANCE * maximum:
            yield Sign("info", **sign.values)


def no_signal(h: History) -> Iterator[Sign]:
    """At least 70% of the recent groups have equal rewards (90%: bad), and advantages compare within groups."""
    share = h.recent_mean("frac_reward_zero_std")
    if not share >= _LITTLE_SIGNAL or not h.facts.compares_groups or len(h.recent("reward")) < FEW_STEPS:
        return
    right, wrong = (h.recent_mean(f"frac_all_{outcome}") for outcome in ("right", "wrong"))
    advice = "Use easier or harder prompts, more rollout.num_generations, or rollout.resample"
    if right >= wrong:
        advice = f"{right:.0%} of the groups are all right: use harder prompts, or rollout.resample"
    elif right > 0 or wrong < 1:  # else a reward that defines no success
        easier = "use easier prompts, more rollout.num_generations, or rollout.resample"
        advice = f"{wrong:.0%} of the groups are all wrong: {easier}"
    is_bad = share >= _NO_SIGNAL
    yield Sign("bad" if is_bad else "warning", start="No" if is_bad else "Little", share=share, advice=advice)


def reward_hacking(h: History) -> Iterator[Sign]:
    """A reward rises while completions shrink to half of their length, in the steps that it scored."""
    lengths = h.column("completions/mean_length")
    for name, weight in h.weights.items():
        rows, means, stds = h.rows_scored_by(name), h.column(f"rewards/{name}/mean"), h.column(f"rewards/{name}/std")
        if len(rows) < WINDOW:
            continue
        first, last = rows[:FEW_STEPS], rows[-WINDOW:]  # a short text is found within few steps
        before, now, length_before, length = (float(v[r].mean()) for v in (means, lengths) for r in (first, last))
        spread = max(np.nan_to_num(stds[first]).mean(), np.nan_to_num(stds[last]).mean())
        gain = (now - before) * np.sign(weight)
        if gain > 0 and gain >= RISE * max(abs(now), abs(before), spread) and length <= COLLAPSE * length_before:
            yield Sign(
                "warning",
                reward=name,
                before=number_text(before),
                now=number_text(now),
                length_before=length_before,
                length=length,
            )


def reward_constant(h: History) -> Iterator[Sign]:
    """A reward has the same value for all completions of the last 10 steps that it scored.

    Only information if the value is better than at first: the model has learned it. Nothing is said of a reward that
    scored less than half of the completions, or that only shapes others.
    """
    for name, weight in h.main_rewards.items():
        rows, means = h.rows_scored_by(name), h.column(f"rewards/{name}/mean")
        last = rows[-WINDOW:]
        unscored = np.nan_to_num(h.column(f"rewards/{name}/frac_unscored")[last])
        stds = h.column(f"rewards/{name}/std")[last]
        if len(last) < WINDOW or unscored.mean() > MOST or not stds.max() <= _TOLERANCE:
            continue
        if np.ptp(means[last]) <= _TOLERANCE:
            value = float(means[rows[-1]])
            is_learned = (value - means[rows[:WINDOW]].mean()) * weight > _TOLERANCE
            which = "" if rows[-WINDOW] == h.num - WINDOW else " that it scored"
            level: Level = "info" if is_learned else "warning"
            yield Sign(level, reward=name, value=number_text(value), num=WINDOW, which=which)


def outweighed(h: History) -> Iterator[Sign]:
    """A reward varies 100 times as much as another one, times their weights, and the advantage adds them up."""
    spreads = {}
    for name, weight in h.main_rewards.items():
        stds = h.column(f"rewards/{name}/std")[h.rows_scored_by(name)[-WINDOW:]]
        if len(stds) == WINDOW and (spread := abs(weight) * float(stds.mean())) > _TOLERANCE:
            spreads[name] = spread
    if not spreads or not h.facts.adds_rewards:
        return
    wide, narrow = max(spreads, key=spreads.__getitem__), min(spreads, key=spreads.__getitem__)
    if (ratio := spreads[wide] / spreads[narrow]) >= _OUTWEIGHED:
        yield Sign("warning", wide=wide, narrow=narrow, ratio=ratio)


def share_above(
    *metrics: str,
    info: float = np.inf,
    warning: float = np.inf,
    bad: float = np.inf,
    steps: int = 1,
    of_groups: bool = False,
) -> Condition:
    """Return the condition that a share of the recent steps exceeds a bound.

    Args:
        metrics: metrics whose means are added up.
        info: bound of each level.
        warning: see `info`.
        bad: see `info`.
        steps: steps before which nothing is said.
        of_groups: whether they count groups, of the `train.prompts_per_step` of a step.
    """

    def condition(h: History) -> Iterator[Sign]:
        share = float(np.nansum([h.recent_mean(name) for name in metrics]))
        if of_groups:
            share = share / h.facts.prompts_per_step if h.facts.prompts_per_step > 0 else 0.0
        bounds: dict[Level, float] = {"bad": bad, "warning": warning, "info": info}
        level = next((level for level, bound in bounds.items() if share > bound), None)
        if level is not None and len(h.recent(metrics[0])) >= steps:
            yield Sign(level, share=share)

    return condition


def slow_environment(h: History) -> Iterator[Sign]:
    """Trajectories of recent steps spend more time in tools and environments than in the model, and over a second."""
    environment_s, model_s = h.recent_mean("turns/environment_s"), h.recent_mean("turns/model_s")
    if environment_s > max(_SLOW_S, np.nan_to_num(model_s)):
        yield Sign("info", environment_s=environment_s, model_s=model_s)
