"""Signs of reward hacking: metrics of a step, and warnings that name the reward and the step."""

import math

import numpy as np
import pytest

from cohort.health.reward_health import RewardWatch, reward_health_metrics
from cohort.health.warning_signs import WINDOW
from cohort.records import Prompt, ScoredGroup
from samples import answer

NAN = math.nan


def scored(lengths, **parts):
    prompt = Prompt(id=0, epoch=0, content="q", token_ids=np.array([1]), columns={})
    arrays = {name: np.array(values, float) for name, values in parts.items()}
    trajectories = tuple(answer(prompt, [7] * length, text="t") for length in lengths)
    return ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=arrays["a"], reward_parts=arrays)


def test_metrics_of_a_step():
    groups = [
        scored([1, 2, 3], a=[1, 2, 3], b=[5, 5, 5], c=[NAN, NAN, NAN]),
        scored([4, 5, 6], a=[4, 5, 6], b=[5, NAN, 5], c=[NAN, 1.0, 0.0]),
    ]
    metrics = reward_health_metrics(groups)
    assert metrics == {
        "rewards/a/frac_unscored": 0.0,
        "rewards/b/frac_unscored": pytest.approx(1 / 6),
        "rewards/c/frac_unscored": pytest.approx(4 / 6),
        "rewards/a/frac_zero_std": 0.0,
        "rewards/a/length_correlation": pytest.approx(1.0),
        "rewards/b/frac_zero_std": 1.0,
        "rewards/b/length_correlation": 0.0,
        "rewards/c/frac_zero_std": 0.0,
        "rewards/c/length_correlation": pytest.approx(-1.0),
    }


def test_groups_that_a_reward_did_not_score_are_left_out():
    scored_half = [scored([1, 1], a=[0, 1], b=[NAN, NAN]), scored([1, 1], a=[1, 1], b=[1, 0])]
    metrics = reward_health_metrics(scored_half)
    assert (metrics["rewards/a/frac_zero_std"], metrics["rewards/b/frac_zero_std"]) == (0.5, 0.0)
    assert math.isnan(reward_health_metrics(scored_half[:1])["rewards/b/frac_zero_std"])


def step(*, length=100.0, zero_std=0.0, a=(0.5, 0.5, 0.0), b=(0.5, 0.5, 0.0)):
    """Metrics of a step. Of each reward: mean, standard deviation, share of groups without variance."""
    metrics = {"completions/mean_length": length, "frac_reward_zero_std": zero_std}
    for name, values in (("a", a), ("b", b)):
        keys = ("mean", "std", "frac_zero_std")
        metrics |= {f"rewards/{name}/{key}": value for key, value in zip(keys, values, strict=True)}
    return metrics


def warnings_of(steps, **weights):
    watch = RewardWatch(weights or {"a": 1.0, "b": 1.0}, shaping=["b"] if "b" in weights else [])
    return [text for number, metrics in enumerate(steps, start=1) for text in watch.warnings(number, metrics)]


def test_a_healthy_run_has_no_warnings():
    """Rising reward with somewhat shorter texts; one part at its best in nearly all steps."""
    best = [(1.0, 0.0, 1.0)] * (WINDOW - 1) + [(0.9, 0.2, 0.5)]
    steps = [step(length=100 - i, a=(0.2 + 0.01 * i, 0.4, 0.1), b=best[i % WINDOW]) for i in range(4 * WINDOW)]
    assert warnings_of(steps) == []


def test_reward_that_rises_while_length_collapses():
    steps = [step(length=100)] * WINDOW + [step(length=20, a=(0.9, 0.2, 0.0))] * (2 * WINDOW)
    (warning,) = warnings_of(steps)
    assert warning.startswith(f"warning: step {WINDOW + 7}: reward 'a' went from 0.5 to 0.78 while completions shrank")
    assert "from 100 to 44 tokens" in warning
    assert warnings_of([step(length=100)] * WINDOW + [step(length=20)] * (2 * WINDOW)) == []  # no reward rose
    b = (0.5, 1e-3, 0.9)
    tiny = [step(length=100, a=(0.0, 1e-4, 0.9), b=b)] * WINDOW
    tiny += [step(length=20, a=(9e-7, 1e-3, 0.9), b=b)] * (2 * WINDOW)
    assert warnings_of(tiny) == []  # one completion in a million
    penalty = warnings_of(steps, a=-1.0)
    assert penalty == []  # a penalty that grows is not a gain


def test_a_part_that_saturates():
    steps = [step()] * 3 + [step(a=(1.0, 0.0, 1.0))] * (2 * WINDOW)
    (warning,) = warnings_of(steps)
    assert warning == (
        f"warning: step {WINDOW + 3}: reward 'a' has been 1 for every completion of the last {WINDOW} steps, so it "
        f"gives no signal"
    )
    assert warnings_of(steps, a=0.0, b=1.0) == []  # it is only logged
    assert warnings_of([step(b=(0.0, 0.0, 1.0))] * (2 * WINDOW), a=1.0, b=1.0) == []  # a penalty that nobody incurs
    unscored = [step(a=(NAN, 0.0, 1.0))] * (2 * WINDOW)
    assert warnings_of(unscored) == []


def test_a_reward_of_which_most_completions_were_not_scored_is_not_judged():
    steps = [step(a=(1.0, 0.0, 1.0)) | {"rewards/a/frac_unscored": share} for share in [0.4, 0.8] * WINDOW]
    assert warnings_of(steps) == []
    scored = [row | {"rewards/a/frac_unscored": 0.5} for row in steps]
    (warning,) = warnings_of(scored)
    assert "reward 'a' has been 1 for every completion" in warning


def test_a_reward_that_applies_to_some_steps_only():
    """Every second step has none of its rows."""
    left_out = step(a=(NAN, 0.0, NAN))
    saturated = [row for _ in range(WINDOW) for row in (step(a=(1.0, 0.0, 1.0)), left_out)]
    assert warnings_of(saturated) == [
        f"warning: step {2 * WINDOW - 1}: reward 'a' has been 1 for every completion of the last {WINDOW} steps that "
        f"it scored, so it gives no signal"
    ]
    short = step(length=20, a=(0.9, 0.2, 0.0))
    collapsed = [row for rows in ([step()] * WINDOW, [short] * WINDOW) for each in rows for row in (each, left_out)]
    (warning,) = warnings_of(collapsed)
    assert "reward 'a' went from 0.5 to" in warning and "(means of 10 steps that it scored)" in warning
    assert warnings_of([step(), left_out] * (2 * WINDOW)) == []


def test_a_reward_that_varies_so_much_that_another_has_no_effect():
    wide = [step(a=(300.0, 250.0, 0.0))] * (2 * WINDOW)
    (warning,) = warnings_of(wide)
    assert warning == (
        f"warning: step {WINDOW}: reward 'a' varies 500 times as much as 'b' (standard deviations of the last {WINDOW} "
        f"steps times their weights), which so has next to no effect; lower the weight of 'a', use its scale or clip, "
        f"or algorithm.name: gdpo, which normalizes each reward"
    )
    assert warnings_of(wide, a=0.01, c=0.0) == []  # one reward alone
    watch = RewardWatch({"a": 0.01, "b": 1.0})
    assert [watch.warnings(n, metrics) for n, metrics in enumerate(wide)] == [[]] * (2 * WINDOW)  # 5 times
    watch = RewardWatch({"a": 1.0, "b": 1.0}, compares_spreads=False)
    assert [watch.warnings(n, metrics) for n, metrics in enumerate(wide)] == [[]] * (2 * WINDOW)
    constant = [step(a=(300.0, 250.0, 0.0), b=(0.0, 0.0, 1.0))] * (2 * WINDOW)
    assert not any("varies" in text for text in warnings_of(constant))  # which has a warning of its own


def test_groups_that_lose_all_variance():
    """Their completions differ between groups, so no part is saturated."""
    steps = [step()] * 3 + [step(zero_std=1.0, a=(0.6, 0.4, 1.0), b=(0.3, 0.4, 1.0))] * (2 * WINDOW)
    (warning,) = warnings_of(steps)
    assert warning.startswith(
        f"warning: step {WINDOW + 3}: in each of the last {WINDOW} steps all rewards of each group"
    )
    assert "('a' at 0.6, 'b' at 0.3)" in warning and "rollout.resample" in warning
