"""Conditions on progress: learning, learned, solved, flat, falling, overfitting."""

import math
from collections.abc import Iterator

import numpy as np

from cohort.health.findings import Sign, number_text
from cohort.health.history import WINDOW, History, finite
from cohort.health.signal_rules import RISE
from cohort.health.trends import change_point, trend

_SOLVED = 0.95  # share of the largest possible reward, or held-out accuracy
_LARGE_RISE = 0.25  # of the largest possible reward: needs no test for random walks
_ENDS = 5  # steps at each end that the large rise has to separate, and that follow a sudden fall
_FLAT_STEPS = 50  # without progress before a rule says so
_FLAT_WARNING = 100  # and before that is a warning
_MIN_Z_HELD_OUT = 4.0  # standard errors between two evaluations
_HELD_OUT_FALL = 0.05  # of accuracy
_TOLERANCE = 1e-8


def too_early(h: History) -> Iterator[Sign]:
    """Fewer than 10 steps: no curve says anything yet."""
    if h.num < WINDOW:
        yield Sign("info", num=h.num, needed=WINDOW)


def solved(h: History) -> Iterator[Sign]:
    """The last held-out accuracy is at least 95%, or the recent reward is of the largest possible one."""
    reward, maximum = h.recent_mean("reward"), h.maximum_reward
    if len(h.accuracies) and h.accuracies[-1] >= _SOLVED:
        yield Sign("good", what=_accuracy(h), metric="eval/accuracy")
    elif maximum is not None and len(h.recent("reward")) >= WINDOW and reward >= _SOLVED * maximum:
        what = f"the reward is {number_text(reward)} of at most {number_text(maximum)}"
        yield Sign("good", what=what, metric="reward")


def learning(h: History) -> Iterator[Sign]:
    """The reward rises significantly in the second half of the run, or the held-out accuracy does, and it goes on."""
    if _is_done(h):
        return
    if h.recent_reward_trend.is_rising and h.reward_trend.rise > 0:
        yield Sign("good", what=_rise(h), metric="reward")
    elif held_out_rises(h) and not h.reward_trend.is_falling and not _has_flat_end(h):
        yield Sign("good", what=_accuracy(h), metric="eval/accuracy")


def learned(h: History) -> Iterator[Sign]:
    """The reward rose significantly over the run, or the held-out accuracy did."""
    now = "" if _is_done(h) else ", and is flat now"
    if has_learned(h):
        yield Sign("good", what=_rise(h), now=now)
    elif held_out_rises(h):
        yield Sign("good", what=_accuracy(h), now=now)


def has_learned(h: History) -> bool:
    """Whether the reward rose over the run: significantly, or by a quarter of the largest possible reward."""
    first, recent = h.first("reward"), h.recent("reward")
    if h.reward_trend.is_rising:
        return True
    if h.num < WINDOW or h.maximum_reward is None or min(len(first), len(recent)) < _ENDS:
        return False
    return bool(recent[-_ENDS:].min() - first[:_ENDS].max() >= _LARGE_RISE * h.maximum_reward)


def no_progress(h: History) -> Iterator[Sign]:
    """At least 50 steps, and the reward does not rise; a warning from 100 steps on."""
    recent = h.recent_mean("reward")
    if h.num < _FLAT_STEPS or h.recent_reward_trend.is_rising or math.isnan(recent):
        return
    first = h.first("reward")
    before = float(first.mean()) if len(first) else math.nan
    what = f"No progress: the reward has stayed near {number_text(recent)} for {h.num} steps"
    if abs(recent - before) > _LARGE_RISE * max(abs(recent), abs(before)):
        change = f"was {number_text(before)} at first and is {number_text(recent)} now"
        what = f"No steady progress in {h.num} steps: the reward {change}"
    yield Sign("warning" if h.num >= _FLAT_WARNING else "info", what=what)


def unclear(h: History) -> Iterator[Sign]:
    """Enough steps for a verdict; other rules about progress explain it."""
    if h.num >= WINDOW:
        num = len(h.recent("reward"))
        reward = f"{number_text(h.recent_mean('reward'))} over the last {num} steps" if num else "not known"
        yield Sign("info", reward=reward)


def reward_falls(h: History) -> Iterator[Sign]:
    """The reward falls significantly, or drops within a step to a value that no completion leaves any more."""
    since = ""
    if found := _drop(h):
        since = ", and no completion has had another one since"
    elif not (found := _fall(h, "reward")):
        return
    step, before, now = found
    rate = number_text(float(finite(h.column("learning_rate")[: np.searchsorted(h.steps, step) + 1]).max(initial=0.0)))
    values = {"around": step, "before": number_text(before), "now": number_text(now), "rate": rate}
    yield Sign("bad", step=step, since=f"{since}{_accuracy_fell(h)}", **values)


def objective_falls(h: History) -> Iterator[Sign]:
    """The reward that defines success falls significantly, while another one makes the sum of rewards rise."""
    objective, others = h.facts.objective, {n: w for n, w in h.weights.items() if n != h.facts.objective}
    found = _fall(h, f"rewards/{objective}/mean") if others and h.weights.get(objective, 0) > 0 else None
    if found is None:
        return
    step, before, now = found
    start = int(np.searchsorted(h.steps, step))
    moves, gains = {}, {}
    for name, weight in others.items():
        values = h.column(f"rewards/{name}/mean")
        around, recent = finite(values[max(0, start - WINDOW) : start]), finite(values[-WINDOW:])
        if len(around) and len(recent):
            moves[name] = float(around.mean()), float(recent.mean())
            gains[name] = weight * (moves[name][1] - moves[name][0])
    gamed = max(gains, key=gains.__getitem__, default="")
    if gamed and gains[gamed] > h.weights[objective] * (before - now) / 2:
        was, became = map(number_text, moves[gamed])
        said = {"gamed": gamed, "was": was, "became": became, "accuracy": _accuracy_fell(h)}
        said |= {"objective": objective, "before": number_text(before), "now": number_text(now)}
        yield Sign("bad", step=step, around=step, **said)


def _fall(h: History, name: str) -> tuple[int, float, float] | None:
    """Return the step around which a reward falls, and its values before and now; None if it does not fall.

    Since its highest 10 steps it falls significantly, by a fifth of its size and of its spread.
    """
    values = h.column(name)
    known = np.flatnonzero(np.isfinite(values))
    values = values[known]
    if len(values) < 2 * WINDOW:
        return None
    smooth = np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")
    best = int(np.argmax(smooth))
    spread = "reward_std" if name == "reward" else name.replace("/mean", "/std")
    least = RISE * max(abs(smooth[best]), abs(smooth[-1]), *finite(h.column(spread))[-1:])
    if smooth[best] - smooth[-1] < 2 * least or not trend(values[best:]).is_falling:
        return None
    step = int(h.steps[known[best + change_point(values[best:])]])
    return step, float(smooth[best]), float(smooth[-1])


def _drop(h: History) -> tuple[int, float, float] | None:
    """Return the step at which the reward fell for good, and its values before and now; None if it did not.

    All completions of at least 5 last steps have the same reward, and the 10 steps before them all had a higher mean,
    by a tenth of the way to their best completion: rare successes may stay away by chance.
    """
    reward = h.column("reward")
    is_last = (np.abs(reward - reward[-1]) <= _TOLERANCE) & (h.column("reward_std") <= _TOLERANCE)
    start = len(reward) - int(np.argmin(is_last[::-1])) if not is_last.all() else 0
    rows = slice(max(0, start - WINDOW), start)
    before, best, now = reward[rows], finite(h.column("reward_max")[rows]), float(reward[-1])
    if len(reward) - start < _ENDS or not len(before) or not before.min() > now + _TOLERANCE:
        return None
    if before.mean() - now < RISE * (best.max(initial=now) - now):
        return None
    return int(h.steps[start]), float(before.mean()), now


def overfitting(h: History) -> Iterator[Sign]:
    """Held-out accuracy falls significantly from its best while the training reward does not."""
    if (found := _accuracy_fall(h)) is None:
        return
    step, before, now = found
    place = int(np.searchsorted(h.steps, step))
    around = h.column("reward")[max(0, place - WINDOW // 2) : place + WINDOW // 2]
    if np.isfinite(around).any() and h.recent_mean("reward") >= np.nanmean(around):
        yield Sign("warning", step=step, best=step, before=before, now=now)


def _accuracy_fall(h: History) -> tuple[int, float, float] | None:
    """Return the step of the best held-out accuracy, that accuracy, and the last, significantly lower one."""
    evaluations, accuracy = h.evaluations, h.accuracies
    if len(accuracy) < 4 or len(accuracy) - (best := int(np.argmax(accuracy))) <= 2:
        return None
    now, highest = float(accuracy[-2:].mean()), float(accuracy[best])
    if highest - now < max(_HELD_OUT_FALL, _MIN_Z_HELD_OUT * _standard_error(h, highest, now)):
        return None
    step = int(evaluations.steps[np.isfinite(evaluations.column("eval/accuracy"))][best])
    return step, highest, now


def _accuracy_fell(h: History) -> str:
    """Say that held-out accuracy fell, too; empty if it did not."""
    found = _accuracy_fall(h)
    return "" if found is None else f"; held-out accuracy fell from {found[1]:.0%} to {found[2]:.0%}"


def held_out_rises(h: History) -> bool:
    """Whether the last held-out accuracy is significantly above the first."""
    if len(h.accuracies) < 2:
        return False
    before, now = h.accuracies[0], h.accuracies[-1]
    return bool(now - before > _MIN_Z_HELD_OUT * _standard_error(h, before, now))


def _standard_error(h: History, before: float, now: float) -> float:
    """Of the difference of two accuracies, from the number of held-out prompts; infinite if that is not known."""
    num = h.evaluations.last("eval/num_prompts")
    if not num or num < 1:
        return math.inf
    p = (before + now) / 2
    return math.sqrt(max(p * (1 - p), 1 / num) * 2 / num)


def _is_done(h: History) -> bool:
    """Whether the run has made all its steps."""
    return 0 < h.facts.num_steps <= h.steps[-1]


def _has_flat_end(h: History) -> bool:
    """Whether the accuracy rose in the first half of the run only."""
    half = h.accuracies[len(h.accuracies) // 2 :]
    return len(h.accuracies) >= 4 and not half[-1] - half[0] > _standard_error(h, half[0], half[-1])


def _accuracy(h: History) -> str:
    first, last = h.accuracies[0], h.accuracies[-1]
    return f"held-out accuracy is {last:.0%}" + (f", up from {first:.0%}" if last > first else "")


def _rise(h: History) -> str:
    """First and last reward, and over how many steps."""
    num = max(3, min(WINDOW, h.num // 5))
    rewards = finite(h.column("reward"))
    before, now = rewards[:num].mean(), rewards[-num:].mean()
    text = f"the reward rose from {number_text(before)} to {number_text(now)} in {h.num} steps"
    if len(h.accuracies) < 2:
        return text
    return f"{text} (held-out accuracy from {h.accuracies[0]:.0%} to {h.accuracies[-1]:.0%})"
