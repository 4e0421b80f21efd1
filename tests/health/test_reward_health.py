"""Metrics of each reward in a step."""

import math

import numpy as np
import pytest

from cohort.health.reward_health import reward_health_metrics
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
