"""Signs of reward hacking: metrics of a step, and warnings that name the reward and the step."""

import math

import numpy as np
import pytest

from cohort.metrics import RewardWatch, reward_health_metrics
from cohort.records import Prompt, ScoredGroup
from cohort.warning_signs import WINDOW
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
    tiny = [step(length=100, a=(0.0, 1e-4, 0.9))] * WINDOW + [step(length=20, a=(9e-7, 1e-3, 0.9))] * (2 * WINDOW)
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


def test_groups_that_lose_all_variance():
    """Their completions differ between groups, so no part is saturated."""
    steps = [step()] * 3 + [step(zero_std=1.0, a=(0.6, 0.4, 1.0), b=(0.3, 0.4, 1.0))] * (2 * WINDOW)
    (warning,) = warnings_of(steps)
    assert warning.startswith(
        f"warning: step {WINDOW + 3}: in each of the last {WINDOW} steps all rewards of each group"
    )
    assert "('a' at 0.6, 'b' at 0.3)" in warning and "rollout.resample" in warning
