"""Rules about the policy and its updates: entropy, KL, lengths, gradients, staleness, memory."""

import math

import numpy as np

from cohort.health.warning_signs import LENGTH_COLLAPSE, MOST, WINDOW, logprob_tolerance, logprobs_are_comparable
from cohort_view.health.observed import Observed, change_point, trend
from cohort_view.health.progress import has_learned, reward_falls, solved
from cohort_view.health.signal import all_rewards_equal, no_signal, reward_hacking
from cohort_view.records import Banner, FloatArray, Level
from cohort_view.values import number_text

_ENTROPY_COLLAPSE = 0.2  # of the entropy at the start
_LOW_ENTROPY = 0.1  # nats
_ENTROPY_EXPLOSION = 2.0  # of the entropy at the start
_ENTROPY_RISE = 0.5  # nats
_ABRUPT = 3.0  # factor between the steps before and after a change point
_KL_INFO, _KL_WARNING, _KL_BAD = 0.1, 0.5, 2.0  # nats per token
_LARGE_MEAN_DIFFERENCE = 0.05  # nats: the parity gate's tolerance in bfloat16
_TRUNCATED_INFO, _TRUNCATED_BAD = 0.25, 0.8  # share of completions; above MOST: warning
_LENGTH_EXPLOSION = 2.0  # of the length at the start
_LENGTH_RISE = 100  # tokens
_SPIKE = 10.0  # of the median gradient norm
_SPIKES = 3  # recent ones before a warning
_STALE_DROPPED = 0.1  # share of a step's groups


def not_finite(o: Observed) -> Banner | None:
    """A recent update has a learning rate, but its gradient norm is not a number."""
    rate, norm = o.table.column("learning_rate"), o.table.column("grad_norm")
    found = np.flatnonzero(np.isfinite(rate) & ~np.isfinite(norm))
    found = found[found >= o.num - o.num_recent]
    if not len(found):
        return None
    step = int(o.steps[found[-1]])
    return Banner(
        level="bad",
        rule="not_finite",
        text=f"The gradient norm is not a number (step {step})",
        step=step,
        evidence=o.evidence("grad_norm", "loss"),
        advice="Lower train.learning_rate, or train with model.dtype: float32; see docs/memory.md",
    )


def entropy_collapsed(o: Observed) -> Banner | None:
    """Entropy is at most 20% of its start and 0.1 nats.

    Bad if the reward has not risen, a warning if most groups have equal rewards or the fall was abrupt, else only
    information: a policy that has learned is sure.
    """
    before, now = o.first_median("entropy"), o.recent_median("entropy")
    if o.num < WINDOW or not now <= min(_ENTROPY_COLLAPSE * before, _LOW_ENTROPY) or solved(o) is not None:
        return None
    values = o.table.column("entropy")
    step, is_abrupt = _change(o, np.log(np.maximum(values, 1e-6)), falls=True)
    has_no_signal = o.recent_mean("frac_reward_zero_std") > MOST
    level: Level = "info"
    if not has_learned(o) or reward_falls(o) is not None:
        level = "bad"
    elif has_no_signal or is_abrupt:
        level = "warning"
    start = f"Entropy collapsed at step {step}" if is_abrupt else "Entropy collapsed gradually"
    if level == "info":
        start = "Entropy is low"
    return Banner(
        level=level,
        rule="entropy_collapsed",
        text=f"{start}: from {number_text(before, 2)} to {number_text(now, 2)} nats per token",
        step=step,
        evidence=o.whole("entropy", "frac_reward_zero_std"),
        advice=None
        if level == "info"
        else "Try a lower train.learning_rate, algorithm.entropy_target, or a higher algorithm.clip_high; see "
        "docs/algorithms.md#notes",
    )


def entropy_explodes(o: Observed) -> Banner | None:
    """Entropy is at least twice its start, and 0.5 nats above; bad if the reward falls."""
    before, now = o.first_median("entropy"), o.recent_median("entropy")
    if o.num < WINDOW or not (now >= _ENTROPY_EXPLOSION * before and now - before >= _ENTROPY_RISE):
        return None
    step, is_abrupt = _change(o, np.log(np.maximum(o.table.column("entropy"), 1e-6)), falls=False)
    when = f" at step {step}" if is_abrupt else ""
    return Banner(
        level="bad" if reward_falls(o) is not None else "warning",
        rule="entropy_explodes",
        text=f"Entropy exploded{when}: from {number_text(before, 2)} to {number_text(now, 2)} nats per token",
        step=step,
        evidence=o.whole("entropy", "reward"),
        advice="Lower train.learning_rate or algorithm.entropy_coef, and read recent completions; see "
        "docs/algorithms.md#notes",
    )


def kl_grows(o: Observed) -> Banner | None:
    """KL to the reference rises significantly and is above 0.1 nats per token (0.5: warning, 2: bad)."""
    now = o.recent_median("kl")
    if not now >= _KL_INFO or not trend(o.table.column("kl")).is_rising:
        return None
    return Banner(
        level="bad" if now >= _KL_BAD else "warning" if now >= _KL_WARNING else "info",
        rule="kl_grows",
        text=f"KL grows: the policy is {number_text(now, 2)} nats per token from the reference",
        step=o.last_step,
        evidence=o.whole("kl", "reward"),
        advice="Raise algorithm.beta, or set algorithm.kl_target; see docs/config.md",
    )


def sampler_differs(o: Observed) -> Banner | None:
    """The sampler's logprobs differ from the trainer's by more than rounding, by the console's tolerance.

    The median over the recent steps of each step's largest difference counts, and only steps that are comparable.
    """
    rollout = {"top_p": o.number("rollout.top_p", 1.0), "top_k": o.number("rollout.top_k", 0)}
    name = "sampling/sampling_logp_difference"
    rows = o.recent_rows([f"{name}/max", f"{name}/mean", "rollout/staleness_max"], o.num_recent)
    rows = [r for r in rows if math.isfinite(r[f"{name}/max"]) and logprobs_are_comparable(rollout, r)]
    if not rows:
        return None
    dtypes = (o.setting("model.dtype", "float32"), o.setting("model.compute_dtype", "auto"))
    is_float32 = dtypes[0] == "float32" and (dtypes[1] == "float32" or o.setting("hardware.device") == "cpu")
    tolerance = logprob_tolerance(has_bfloat16=not is_float32)
    largest, mean = (float(np.median([row[f"{name}/{kind}"] for row in rows])) for kind in ("max", "mean"))
    if not largest > tolerance:
        return None
    return Banner(
        level="bad" if mean > _LARGE_MEAN_DIFFERENCE else "warning",
        rule="sampler_differs",
        text=f"Sampler and trainer differ: logprobs by up to {number_text(largest, 2)} nats "
        f"({number_text(mean, 2)} on average)",
        step=o.last_step,
        evidence=o.evidence(f"{name}/max", f"{name}/mean"),
        advice=f"Rounding explains at most {tolerance:g} nats; check the sampler's model, dtype and temperature; "
        "see docs/rollouts.md#the-parity-gate",
    )


def truncated(o: Observed) -> Banner | None:
    """More than 50% of the recent completions hit the token limit (80%: bad, 25%: info)."""
    share = o.recent_mean("completions/clipped_ratio")
    if not share > _TRUNCATED_INFO:
        return None
    return Banner(
        level="bad" if share > _TRUNCATED_BAD else "warning" if share > MOST else "info",
        rule="truncated",
        text=f"{share:.0%} truncated: completions end at the token limit",
        step=o.last_step,
        evidence=o.evidence("completions/clipped_ratio", "completions/mean_length"),
        advice="Raise rollout.max_completion_tokens, or set algorithm.mask_truncated_completions; see docs/config.md",
    )


def length_changes(o: Observed) -> Banner | None:
    """Completions are half as long as at the start, or twice as long and 100 tokens longer."""
    before, now = o.first_median("completions/mean_length"), o.recent_median("completions/mean_length")
    if o.num < 2 * WINDOW or math.isnan(before) or math.isnan(now):
        return None
    is_shorter = now <= LENGTH_COLLAPSE * before
    if not (is_shorter or (now >= _LENGTH_EXPLOSION * before and now - before >= _LENGTH_RISE)):
        return None
    step, is_abrupt = _change(o, np.log(np.maximum(o.table.column("completions/mean_length"), 1.0)), falls=is_shorter)
    when = f" at step {step}" if is_abrupt else ""
    if is_shorter and reward_hacking(o) is not None:
        return None
    is_harmful = reward_falls(o) is not None or (is_shorter and not has_learned(o))
    return Banner(
        level="warning" if is_harmful else "info",
        rule="length_collapses" if is_shorter else "length_explodes",
        text=f"Completions {'shrank' if is_shorter else 'grew'}{when} from {before:.0f} to {now:.0f} tokens",
        step=step,
        evidence=o.whole("completions/mean_length", "completions/clipped_ratio", "reward"),
        advice="Compare completions of an early and a recent step; see docs/rewards.md#reward-hacking",
    )


def no_gradient(o: Observed) -> Banner | None:
    """The gradient norm is 0 in at least half of the recent steps, and equal rewards are not the reason."""
    norm = o.recent("grad_norm")
    share = float((norm == 0).mean()) if len(norm) else 0.0
    if share < MOST or len(norm) < 3 or no_signal(o) or all_rewards_equal(o) or solved(o):
        return None
    return Banner(
        level="bad" if share == 1 else "warning",
        rule="no_gradient",
        text=f"The gradient is 0 in {share:.0%} of the last {len(norm)} steps",
        step=o.last_step,
        evidence=o.evidence("grad_norm", "completions/trained_ratio", "learning_rate"),
        advice="Open one of these steps: the page says why it learned nothing; see docs/view.md#what-the-banner-says",
    )


def gradient_spikes(o: Observed) -> Banner | None:
    """A recent gradient norm is 10 times the run's median and above train.max_grad_norm; three: a warning."""
    norm = o.table.column("grad_norm")
    known = norm[np.isfinite(norm) & (norm > 0)]
    if len(known) < WINDOW:
        return None
    median = float(np.median(known))
    found = np.flatnonzero(norm > max(_SPIKE * median, o.number("train.max_grad_norm", 1.0)))
    found = found[found >= o.num - o.num_recent]
    if not len(found):
        return None
    step, largest = int(o.steps[found[-1]]), float(norm[found].max())
    return Banner(
        level="warning" if len(found) >= _SPIKES else "info",
        rule="gradient_spikes",
        text=f"Gradient norm spikes: {number_text(largest)}, {largest / median:.0f} times the median "
        f"(last at step {step})",
        step=step,
        evidence=o.evidence("grad_norm", "learning_rate"),
        advice="Clipping bounds the update; if they go on, lower train.learning_rate; see docs/config.md",
    )


def out_of_memory(o: Observed) -> Banner | None:
    """Micro-batches of recent steps ran out of memory; a warning if that is so in half of them."""
    counts = o.recent("out_of_memory")
    total = int(counts.sum())
    if not total:
        return None
    budget = o.recent("micro_batch_tokens")
    now = f"; the budget is {budget[-1]:.0f} tokens now" if len(budget) else ""
    return Banner(
        level="warning" if (counts > 0).mean() >= MOST else "info",
        rule="out_of_memory",
        text=f"{total} micro-batches ran out of memory in the last {len(counts)} steps and were repeated{now}",
        step=o.last_step,
        evidence=o.evidence("out_of_memory", "micro_batch_tokens"),
        advice="Set a lower train.micro_batch_tokens; see docs/memory.md",
    )


def stale_dropped(o: Observed) -> Banner | None:
    """More than 10% of a step's groups are dropped because they are too old."""
    prompts = o.number("train.prompts_per_step", math.inf)
    share = o.recent_mean("rollout/stale_dropped") / prompts if prompts else 0.0
    if not share > _STALE_DROPPED:
        return None
    return Banner(
        level="warning",
        rule="stale_dropped",
        text=f"{share:.0%} of a step's groups are dropped because they are too old",
        step=o.last_step,
        evidence=o.evidence("rollout/stale_dropped", "rollout/staleness_max"),
        advice="Use rollout.stale_completions: correct, or more rollout GPUs; see "
        "docs/rollouts.md#sampling-ahead-of-training",
    )


def _change(o: Observed, values: FloatArray, *, falls: bool) -> tuple[int, bool]:
    """Return the step at which a curve changes most, and whether it changes there by more than a factor of 3.

    Args:
        o: the run.
        values: [steps] logarithms; NaN is missing.
        falls: whether it falls or rises.
    """
    known = np.flatnonzero(np.isfinite(values))
    values = values[known]
    place = change_point(values)
    near = max(3, min(WINDOW, len(values) // 10))
    before, after = np.median(values[max(0, place - near) : place]), np.median(values[place : place + near])
    change = before - after if falls else after - before
    return int(o.steps[known[place]]), bool(change >= math.log(_ABRUPT))
