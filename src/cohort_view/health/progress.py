"""Rules about progress: learning, learned, solved, flat, falling, overfitting."""

import math
from fractions import Fraction

import numpy as np

from cohort.health.warning_signs import REWARD_RISE, WINDOW
from cohort_view.health.observed import Observed, change_point, trend
from cohort_view.records import Banner, FloatArray
from cohort_view.values import number_text

_SOLVED = 0.95  # share of the largest possible reward, or held-out accuracy
_LARGE_RISE = 0.25  # of the largest possible reward: needs no test for random walks
_ENDS = 5  # steps at each end that the large rise has to separate
_FLAT_STEPS = 50  # without progress before a banner says so
_FLAT_WARNING = 100  # and before that is a warning
_MIN_Z_HELD_OUT = 4.0  # standard errors between two evaluations
_HELD_OUT_FALL = 0.05  # of accuracy
_MOST_PROMPTS = 100_000  # held-out prompts that accuracies are fractions of


def too_early(o: Observed) -> Banner | None:
    """Fewer than 10 steps: no curve says anything yet."""
    if o.num >= WINDOW:
        return None
    text = f"Too early to say: {o.num} of the {WINDOW} steps that a verdict needs"
    return Banner(level="info", rule="too_early", text=text, step=o.last_step, evidence=o.whole("reward"))


def solved(o: Observed) -> Banner | None:
    """The recent reward is at least 95% of the largest possible one, or the last held-out accuracy is."""
    accuracy, reward = _last(o.table.eval.column("eval/accuracy")), o.recent_mean("reward")
    maximum = o.maximum_reward
    if not math.isnan(accuracy) and accuracy >= _SOLVED:
        text = f"Solved: held-out accuracy is {accuracy:.0%}{_from_accuracy(o)}"
        metric = "eval/accuracy"
    elif maximum is not None and len(o.recent("reward")) >= WINDOW and reward >= _SOLVED * maximum:
        text = f"Solved: the reward is {number_text(reward)} of at most {number_text(maximum)}"
        metric = "reward"
    else:
        return None
    return Banner(level="good", rule="solved", text=text, step=o.last_step, evidence=o.whole(metric, "reward")[:2])


def learning(o: Observed) -> Banner | None:
    """The reward rises significantly in the second half of the run, or the held-out accuracy does."""
    if o.recent_reward_trend.is_rising and o.reward_trend.rise > 0:
        text = f"Learning: the reward rose from {_before_and_now(o)}{_accuracy_clause(o)}"
        return Banner(level="good", rule="learning", text=text, step=o.last_step, evidence=o.whole("reward"))
    if held_out_rises(o) and not o.reward_trend.is_falling and not _has_flat_end(o):
        text = f"Learning: held-out accuracy is {_last(_accuracies(o)):.0%}{_from_accuracy(o)}"
        return Banner(level="good", rule="learning", text=text, step=o.last_step, evidence=o.whole("eval/accuracy"))
    return None


def learned(o: Observed) -> Banner | None:
    """The reward rose significantly over the run, but no longer does."""
    if not (has_learned(o) or held_out_rises(o)) or learning(o) is not None or reward_falls(o) is not None:
        return None
    if has_learned(o):
        text = f"Learned: the reward rose from {_before_and_now(o)}{_accuracy_clause(o)}, and is flat now"
    else:
        text = f"Learned: held-out accuracy is {_last(_accuracies(o)):.0%}{_from_accuracy(o)}, and is flat now"
    return Banner(level="good", rule="learned", text=text, step=o.last_step, evidence=o.whole("reward"))


def has_learned(o: Observed) -> bool:
    """Whether the reward rose over the run: significantly, or by a quarter of the largest possible reward."""
    if o.reward_trend.is_rising:
        return True
    first, recent = o.first("reward"), o.recent("reward")
    if o.num < WINDOW or o.maximum_reward is None or min(len(first), len(recent)) < _ENDS:
        return False
    start, end = first[:_ENDS], recent[-_ENDS:]
    return bool(end.min() - start.max() >= _LARGE_RISE * o.maximum_reward)


def no_progress(o: Observed) -> Banner | None:
    """At least 50 steps without a significant rise; a warning from 100 steps on."""
    if o.num < _FLAT_STEPS or has_learned(o) or held_out_rises(o) or o.recent_reward_trend.is_rising:
        return None
    if reward_falls(o) is not None or not len(o.recent("reward")):
        return None
    return Banner(
        level="warning" if o.num >= _FLAT_WARNING else "info",
        rule="no_progress",
        text=_without_progress(o),
        step=o.last_step,
        evidence=o.whole("reward", "frac_reward_zero_std"),
        advice="Read some groups first; then try a higher train.learning_rate or easier prompts; see "
        "docs/algorithms.md#notes",
    )


def _without_progress(o: Observed) -> str:
    first, recent = o.first("reward"), o.recent_mean("reward")
    before = float(first.mean()) if len(first) else math.nan
    if abs(recent - before) > _LARGE_RISE * max(abs(recent), abs(before)):
        change = f"was {number_text(before)} at first and is {number_text(recent)} now"
        return f"No steady progress in {o.num} steps: the reward {change}"
    return f"No progress: the reward has stayed near {number_text(recent)} for {o.num} steps"


def unclear(o: Observed) -> Banner | None:
    """Enough steps, and no rule about progress fires."""
    if o.num < WINDOW or any(rule(o) for rule in (solved, learning, learned, no_progress, reward_falls)):
        return None
    num = len(o.recent("reward"))
    reward = f"{number_text(o.recent_mean('reward'))} over the last {num} steps" if num else "not known"
    text = f"No clear trend yet: the reward is {reward}"
    return Banner(level="info", rule="unclear", text=text, step=o.last_step, evidence=o.whole("reward"))


def reward_falls(o: Observed) -> Banner | None:
    """Since its highest 10 steps the reward falls significantly, by a tenth of its size and of its spread."""
    reward = o.table.column("reward")
    known = np.flatnonzero(np.isfinite(reward))
    values = reward[known]
    if len(values) < 2 * WINDOW:
        return None
    smooth = np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")
    best = int(np.argmax(smooth))
    after = values[best:]
    spread = _last(o.table.column("reward_std"))
    least = REWARD_RISE * max(abs(smooth[best]), abs(smooth[-1]), 0.0 if math.isnan(spread) else spread)
    if smooth[best] - smooth[-1] < 2 * least or not trend(after).is_falling:
        return None
    step = int(o.steps[known[best + change_point(after)]]) if len(after) > 1 else o.last_step
    return Banner(
        level="bad",
        rule="reward_falls",
        text=f"The reward fell from {number_text(smooth[best])} to {number_text(smooth[-1])}, around step {step}",
        step=step,
        evidence=o.evidence("reward", "entropy", "grad_norm", start=int(o.steps[known[best]])),
        advice="Go back to an earlier checkpoint with a lower train.learning_rate, or with algorithm.beta above 0; see "
        "docs/resuming.md and docs/algorithms.md#notes",
    )


def overfitting(o: Observed) -> Banner | None:
    """Held-out accuracy falls significantly from its best while the training reward does not."""
    table = o.table.eval
    known = np.flatnonzero(np.isfinite(table.column("eval/accuracy")))
    accuracy, steps = table.column("eval/accuracy")[known], table.steps[known]
    if len(accuracy) < 4:
        return None
    best = int(np.argmax(accuracy))
    if len(accuracy) - best <= 2:
        return None
    now = float(accuracy[-2:].mean())
    fall = float(accuracy[best]) - now
    if fall < _HELD_OUT_FALL or fall < _MIN_Z_HELD_OUT * _standard_error(accuracy, accuracy[best], now):
        return None
    reward, place = o.table.column("reward"), int(np.searchsorted(o.steps, steps[best]))
    around = reward[max(0, place - WINDOW // 2) : place + WINDOW // 2]
    if not np.isfinite(around).any() or o.recent_mean("reward") < np.nanmean(around):
        return None
    return Banner(
        level="warning",
        rule="overfitting",
        text=f"Held-out accuracy fell from {accuracy[best]:.0%} (step {steps[best]}) to {now:.0%} while the training "
        f"reward did not fall",
        step=int(steps[best]),
        evidence=o.evidence("eval/accuracy", "reward", start=int(steps[best])),
        advice=f"Use the checkpoint closest to step {steps[best]}, and read recent completions for reward hacking; see "
        "docs/rewards.md#reward-hacking",
    )


def held_out_rises(o: Observed) -> bool:
    """Whether the last held-out accuracy is significantly above the first."""
    accuracy = _accuracies(o)
    if len(accuracy) < 2:
        return False
    rise = float(accuracy[-1] - accuracy[0])
    return rise > _MIN_Z_HELD_OUT * _standard_error(accuracy, accuracy[0], accuracy[-1])


def _standard_error(accuracies: FloatArray, before: float, now: float) -> float:
    """Of the difference of two accuracies, each over as many prompts as their common denominator says at least."""
    num = 1
    for accuracy in accuracies.tolist():
        num = math.lcm(num, Fraction(accuracy).limit_denominator(_MOST_PROMPTS).denominator)
        if num > _MOST_PROMPTS:  # means of several samples, or rounded values
            return math.inf
    p = (before + now) / 2
    return math.sqrt(max(p * (1 - p), 1 / num) * 2 / num)


def _has_flat_end(o: Observed) -> bool:
    """Whether the accuracy rose in the first half of the run only."""
    accuracy = _accuracies(o)
    if len(accuracy) < 4:
        return False
    half = accuracy[len(accuracy) // 2 :]
    return not half[-1] - half[0] > _standard_error(accuracy, half[0], half[-1])


def _accuracies(o: Observed) -> FloatArray:
    accuracy = o.table.eval.column("eval/accuracy")
    return accuracy[np.isfinite(accuracy)]


def _last(values: FloatArray) -> float:
    found = values[np.isfinite(values)]
    return float(found[-1]) if len(found) else math.nan


def _from_accuracy(o: Observed) -> str:
    accuracy = _accuracies(o)
    return f", up from {accuracy[0]:.0%}" if len(accuracy) > 1 and accuracy[-1] > accuracy[0] else ""


def _accuracy_clause(o: Observed) -> str:
    accuracy = _accuracies(o)
    if len(accuracy) < 2:
        return ""
    return f" (held-out accuracy from {accuracy[0]:.0%} to {accuracy[-1]:.0%})"


def _before_and_now(o: Observed) -> str:
    """First and last reward, and over how many steps."""
    num = max(3, min(WINDOW, o.num // 5))
    before, now = o.first("reward")[:num].mean(), o.recent("reward")[-num:].mean()
    return f"{number_text(before)} to {number_text(now)} in {o.num} steps"
