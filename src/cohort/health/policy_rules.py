"""Conditions on the policy and its updates: entropy, KL, lengths, gradients, memory."""

import math
from collections.abc import Iterator

import numpy as np

from cohort.health.findings import Level, Sign, number_text
from cohort.health.history import WINDOW, Condition, History, finite
from cohort.health.progress_rules import has_learned, reward_falls
from cohort.health.signal_rules import COLLAPSE, FEW_STEPS, MOST
from cohort.health.trends import change_point, trend
from cohort.records import FloatArray

_ENTROPY_COLLAPSE = 0.2  # of the entropy at the start
_LOW_ENTROPY = 0.1  # nats
_EXPLOSION = 2.0  # of the entropy or length at the start
_ENTROPY_RISE = 0.5  # nats
_LENGTH_RISE = 100  # tokens
_ABRUPT = 3.0  # factor between the steps before and after a change point
_KL_INFO, _KL_WARNING, _KL_BAD = 0.1, 0.5, 2.0  # nats per token
_LARGE_MEAN_DIFFERENCE = 0.05  # nats: the parity gate's tolerance in bfloat16
_SPIKE = 10.0  # of the median gradient norm
_SPIKES = 3  # recent ones before a warning


def not_finite(h: History) -> Iterator[Sign]:
    """A recent update has a learning rate, but its gradient norm is not a number."""
    rate, norm = h.column("learning_rate"), h.column("grad_norm")
    if len(rows := h.recent_rows(np.isfinite(rate) & ~np.isfinite(norm))):
        step = int(h.steps[rows[-1]])
        yield Sign("bad", step=step, at=step)


def entropy_collapsed(h: History) -> Iterator[Sign]:
    """Entropy is at most 20% of its start and 0.1 nats.

    Bad if the reward has not risen, a warning if most groups have equal rewards or the fall was abrupt, else only
    information: a policy that has learned is sure.
    """
    before, now = h.medians("entropy")
    if h.num < WINDOW or not now <= min(_ENTROPY_COLLAPSE * before, _LOW_ENTROPY):
        return
    step, is_abrupt = _change(h, "entropy", falls=True)
    level: Level = "info"
    if not has_learned(h) or h.signs(reward_falls):
        level = "bad"
    elif is_abrupt or h.recent_mean("frac_reward_zero_std") > MOST:
        level = "warning"
    what = "is low" if level == "info" else f"collapsed at step {step}" if is_abrupt else "collapsed gradually"
    advice = "Try a lower train.learning_rate, algorithm.entropy_target, or a higher algorithm.clip_high; see "
    advice = "" if level == "info" else f"{advice}docs/algorithms.md#notes"
    yield Sign(level, step=step, what=what, advice=advice, before=number_text(before, 2), now=number_text(now, 2))


def entropy_explodes(h: History) -> Iterator[Sign]:
    """Entropy is at least twice its start, and 0.5 nats above; bad if the reward falls."""
    before, now = h.medians("entropy")
    if h.num >= WINDOW and now >= _EXPLOSION * before and now - before >= _ENTROPY_RISE:
        step, is_abrupt = _change(h, "entropy", falls=False)
        level: Level = "bad" if h.signs(reward_falls) else "warning"
        when = f" at step {step}" if is_abrupt else ""
        yield Sign(level, step=step, when=when, before=number_text(before, 2), now=number_text(now, 2))


def kl_grows(h: History) -> Iterator[Sign]:
    """KL to the reference rises significantly and is above 0.1 nats per token (0.5: warning, 2: bad)."""
    _, now = h.medians("kl")
    if now >= _KL_INFO and trend(h.column("kl")).is_rising:
        level: Level = "bad" if now >= _KL_BAD else "warning" if now >= _KL_WARNING else "info"
        yield Sign(level, now=number_text(now, 2))


def sampler_differs(h: History) -> Iterator[Sign]:
    """The sampler's logprobs differ from the trainer's by more than rounding, in steps in which they should agree.

    The median over the recent steps of each step's largest difference counts. Top-p, top-k, min-p and a repetition
    penalty change the sampler's distribution, and older weights sampled stale completions.
    """
    stale, *differences = (
        h.column(name)[-h.num_recent :]
        for name in (
            "rollout/staleness_max",
            *(f"sampling/sampling_logp_difference/{kind}" for kind in ("max", "mean")),
        )
    )
    largest, mean = (values[np.isfinite(differences[0]) & ~(stale > 0)] for values in differences)
    if len(largest) and h.facts.samples_from_policy and np.median(largest) > h.facts.logprob_tolerance:
        level: Level = "bad" if np.median(mean) > _LARGE_MEAN_DIFFERENCE else "warning"
        largest_text, mean_text = (number_text(float(np.median(values)), 2) for values in (largest, mean))
        yield Sign(level, largest=largest_text, mean=mean_text)


def length_changes(*, shrinks: bool) -> Condition:
    """Return the condition that completions are half as long as at first, or twice as long and 100 tokens longer."""

    def condition(h: History) -> Iterator[Sign]:
        name = "completions/mean_length"
        before, now = h.medians(name)
        is_longer = now >= _EXPLOSION * before and now - before >= _LENGTH_RISE
        if h.num < 2 * WINDOW or not (now <= COLLAPSE * before if shrinks else is_longer):
            return
        step, is_abrupt = _change(h, name, falls=shrinks)
        is_harmful = h.signs(reward_falls) or (shrinks and not has_learned(h))
        when = f" at step {step}" if is_abrupt else ""
        yield Sign("warning" if is_harmful else "info", step=step, when=when, before=before, now=now)

    return condition


def no_gradient(h: History) -> Iterator[Sign]:
    """The gradient norm is 0 in at least half of the recent steps, although they have a learning rate."""
    norm = finite(np.where(h.column("learning_rate") == 0, np.nan, h.column("grad_norm"))[-h.num_recent :])
    share = float((norm == 0).mean()) if len(norm) >= FEW_STEPS else 0.0
    if share >= MOST:
        yield Sign("bad" if share == 1 else "warning", share=share, num=len(norm))


def gradient_spikes(h: History) -> Iterator[Sign]:
    """A recent gradient norm is 10 times the run's median and above train.max_grad_norm; three: a warning."""
    norm = h.column("grad_norm")
    known = norm[np.isfinite(norm) & (norm > 0)]
    if len(known) < WINDOW:
        return
    median = float(np.median(known))
    rows = h.recent_rows(norm > max(_SPIKE * median, h.facts.max_grad_norm))
    if len(rows):
        step, largest = int(h.steps[rows[-1]]), float(norm[rows].max())
        level: Level = "warning" if len(rows) >= _SPIKES else "info"
        yield Sign(level, step=step, last=step, largest=number_text(largest), ratio=largest / median)


def out_of_memory(h: History) -> Iterator[Sign]:
    """Micro-batches of recent steps ran out of memory; a warning if that is so in half of 10 steps or more."""
    counts, budget = h.recent("out_of_memory"), h.recent("micro_batch_tokens")
    if total := int(counts.sum()):
        now = f"; the budget is {budget[-1]:.0f} tokens now" if len(budget) else ""
        is_frequent = len(counts) >= WINDOW and (counts > 0).mean() >= MOST
        yield Sign("warning" if is_frequent else "info", total=total, num=len(counts), now=now)


def _change(h: History, name: str, *, falls: bool) -> tuple[int, bool]:
    """Return the step at which a positive metric changes most, and whether it does there by more than a factor of 3."""
    values = _log(h.column(name))
    known = np.flatnonzero(np.isfinite(values))
    values = values[known]
    place = change_point(values)
    near = max(FEW_STEPS, min(WINDOW, len(values) // 10))
    before, after = np.median(values[max(0, place - near) : place]), np.median(values[place : place + near])
    change = before - after if falls else after - before
    return int(h.steps[known[place]]), bool(change >= math.log(_ABRUPT))


def _log(values: FloatArray) -> FloatArray:
    """Logarithms of entropies in nats or lengths in tokens, with a floor."""
    return np.log(np.maximum(values, 1e-6))
