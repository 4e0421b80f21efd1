"""Rules about the learning signal: equal rewards, rewards that can be gamed, completions without a reward."""

import math

import numpy as np

from cohort.health.warning_signs import MOST, WINDOW, constant_reward, shorter_but_higher, turn_signs
from cohort_view.health.observed import Observed
from cohort_view.records import Banner, Level
from cohort_view.values import number_text

_NO_SIGNAL = 0.9  # share of groups with equal rewards
_LITTLE_SIGNAL = 0.7
_FEW_STEPS = 3  # in which all rewards are 0 before a banner says so
_UNSCORED = 0.1  # share of completions
_BROKEN = 0.1  # share of trajectories
_DROPPED = 0.1  # share of a step's groups
_TOLERANCE = 1e-8


def all_rewards_equal(o: Observed) -> Banner | None:
    """Every completion of the recent steps has the same reward: all 0, all at the maximum, or another constant."""
    rewards = o.recent("reward")
    if len(rewards) < _FEW_STEPS or np.ptp(rewards) > _TOLERANCE or o.recent_mean("reward_std") > _TOLERANCE:
        return None
    if not o.recent_mean("frac_reward_zero_std") >= 1:
        return None
    value, num = float(rewards[-1]), len(rewards)
    level: Level = "bad" if num >= WINDOW else "warning"
    evidence = o.evidence("reward", "frac_reward_zero_std")
    if abs(value) <= _TOLERANCE:
        advice = (
            "Check on a few completions that the reward can be earned, with `cohort reward`; then use easier "
            "prompts or more generations; see docs/rewards.md"
        )
        text = f"All rewards are 0 in the last {num} steps: there is nothing to learn from"
        return Banner(level=level, rule="all_zero", text=text, step=o.last_step, evidence=evidence, advice=advice)
    if o.maximum_reward is not None and abs(value - o.maximum_reward) <= _TOLERANCE:
        text = f"All rewards are {number_text(value)}, the maximum, in the last {num} steps: nothing is left to learn"
        advice = "Use harder prompts, or stop here; see docs/rollouts.md#dynamic-sampling"
        return Banner(level="info", rule="all_one", text=text, step=o.last_step, evidence=evidence, advice=advice)
    text = f"All rewards are {number_text(value)} in the last {num} steps: there is nothing to learn from"
    advice = "Check that the reward can tell completions apart; see docs/rewards.md#writing-a-reward"
    return Banner(level=level, rule="all_equal", text=text, step=o.last_step, evidence=evidence, advice=advice)


def no_signal(o: Observed) -> Banner | None:
    """At least 70% of the recent groups have equal rewards (90%: bad), and advantages compare within groups."""
    share = o.recent_mean("frac_reward_zero_std")
    if not share >= _LITTLE_SIGNAL or not o.compares_groups or len(o.recent("reward")) < _FEW_STEPS:
        return None
    reward, maximum = o.recent_mean("reward"), o.maximum_reward
    if maximum is not None and reward >= maximum / 2:
        advice = "Most groups are right: use harder prompts, or rollout.resample"
    elif maximum is not None:
        advice = "Most groups are wrong: use easier prompts, more rollout.num_generations, or rollout.resample"
    else:
        advice = "Use easier or harder prompts, more rollout.num_generations, or rollout.resample"
    start = "No signal" if share >= _NO_SIGNAL else "Little signal"
    return Banner(
        level="bad" if share >= _NO_SIGNAL else "warning",
        rule="no_signal",
        text=f"{start}: {share:.0%} of groups have equal rewards",
        step=o.last_step,
        evidence=o.evidence("frac_reward_zero_std", "completions/trained_ratio"),
        advice=f"{advice}; see docs/rollouts.md#dynamic-sampling",
    )


def reward_hacking(o: Observed) -> Banner | None:
    """A reward rose while completions shrank to half of their length: the rule of the console's warning."""
    for name, weight in o.weights.items():
        rows = o.rows_scored_by(name)
        if len(rows) < 2 * WINDOW:
            continue
        sign = shorter_but_higher(rows[:WINDOW], rows[-WINDOW:], name, weight)
        if sign is not None:
            return Banner(
                level="warning",
                rule="reward_hacking",
                text=f"Reward {name!r} rose from {number_text(sign.value_before)} to {number_text(sign.value)} while "
                f"completions shrank from {sign.length_before:.0f} to {sign.length:.0f} tokens",
                step=o.last_step,
                evidence=o.whole(f"rewards/{name}/mean", "completions/mean_length"),
                advice="Read some completions: it may reward short texts; see docs/rewards.md#reward-hacking",
            )
    return None


def one_reward_constant(o: Observed) -> Banner | None:
    """One of several rewards had the same value for every completion of the last 10 steps, as the console warns."""
    if len(o.weights) < 2:
        return None
    for name in o.weights.keys() - o.shaping:
        rows = o.rows_scored_by(name)[-WINDOW:]
        value = constant_reward(rows, name) if len(rows) == WINDOW else None
        if value is not None:
            return Banner(
                level="info",
                rule="one_reward_constant",
                text=f"Reward {name!r} is {number_text(value)} for every completion of the last {WINDOW} steps that it "
                f"scored, so it gives no signal",
                step=o.last_step,
                evidence=o.evidence(f"rewards/{name}/mean", f"rewards/{name}/std"),
                advice="Remove it, or change its weight; see docs/rewards.md#combining-rewards",
            )
    return None


def unscored(o: Observed) -> Banner | None:
    """No reward scores more than 10% of the recent completions (50%: bad)."""
    share = o.recent_mean("frac_unscored")
    if not share > _UNSCORED:
        return None
    return Banner(
        level="bad" if share > MOST else "warning",
        rule="unscored",
        text=f"{share:.0%} of completions are scored by no reward",
        step=o.last_step,
        evidence=o.evidence("frac_unscored"),
        advice="Look for errors and missing columns in the step's completions; see docs/rewards.md#writing-a-reward",
    )


def broken(o: Observed) -> Banner | None:
    """More than 10% of the recent trajectories break (50%: bad), or more than 10% of a step's groups are dropped."""
    shares = [o.recent_mean(f"ends/{end}") for end in ("timeout", "environment_error")]
    share = sum(s for s in shares if not math.isnan(s))
    prompts = o.number("train.prompts_per_step", math.inf)
    dropped = o.recent_mean("rollout/dropped_groups") / prompts if prompts else 0.0
    if share > _BROKEN:
        text, value = f"{share:.0%} of trajectories break: they time out or their environment fails", share
        evidence = o.evidence("ends/timeout", "ends/environment_error")
    elif dropped > _DROPPED:
        text, value = f"{dropped:.0%} of a step's groups are dropped because their trajectories broke", dropped
        evidence = o.evidence("rollout/dropped_groups")
    else:
        return None
    return Banner(
        level="bad" if value > MOST else "warning",
        rule="broken",
        text=text,
        step=o.last_step,
        evidence=evidence,
        advice="Read the errors of a step's broken trajectories; see docs/environments.md#when-an-environment-fails",
    )


def turns(o: Observed) -> Banner | None:
    """Turns go wrong in most of the recent steps: the rules of the console's warnings, on means."""
    names = [
        "tools/malformed_ratio",
        "tools/failure_frequency",
        "ends/max_turns",
        "turns/model_s",
        "turns/environment_s",
    ]
    means = {name: o.recent_mean(name) for name in names if len(o.recent(name))}
    for metric, text in turn_signs(means, int(o.number("rollout.max_turns", 8))).items():
        return Banner(
            level="info" if metric == "turns/environment_s" else "warning",
            rule="turns",
            text=text[0].upper() + text[1:],
            step=o.last_step,
            evidence=o.evidence(metric),
            advice="See docs/tools.md#when-something-goes-wrong",
        )
    return None
