"""Why a step learned nothing: one reason per made-up step."""

import math

import pytest

from cohort.health.explain import GroupsSummary, explain_step
from cohort.health.findings import number_text

HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.25,
    "frac_unscored": 0.0,
    "completions/trained_ratio": 0.75,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
}
EQUAL = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "grad_norm": 0.0, "completions/trained_ratio": 0.0}


def groups(*, low=0.0, high=1.0, num_equal=4, scored=64, broken=0):
    return GroupsSummary(
        num_groups=16,
        num_equal=num_equal,
        num_rows=64,
        num_scored=scored,
        num_broken=broken,
        reward_min=low if scored else None,
        reward_max=high if scored else None,
    )


# Changed metrics, groups, and what the sentence says after "learned nothing: ".
NOTHING = [
    (
        {**EQUAL, "reward": 0.0},
        groups(high=0.0),
        "every completion in all 16 groups is wrong (reward 0), so every",
    ),
    (
        {**EQUAL, "reward": 1.0},
        groups(low=1.0),
        "every completion in all 16 groups is right (reward 1, the maximum), so",
    ),
    ({**EQUAL, "reward": 0.5}, groups(), "all 16 groups have equal rewards within the group, from 0 to 1, so"),
    ({**EQUAL, "reward_min": 0.0, "reward_max": 0.0}, None, "every completion in all groups is wrong"),
    (
        {**EQUAL, "reward_min": 1.0, "reward_max": 1.0, "num_groups": 8},
        None,
        "every completion in all 8 groups is right",
    ),
    ({**EQUAL, "reward": 0.0}, None, "all groups have equal rewards within the group, so"),
    ({"grad_norm": math.nan}, groups(), "its gradient norm is not a number"),
    ({"grad_norm": None}, groups(), "its gradient norm is not a number"),
    ({"learning_rate": 0.0}, groups(), "its learning rate is 0"),
    ({"frac_unscored": 1.0, "grad_norm": 0.0}, None, "no reward scored any of its completions"),
    ({"grad_norm": 0.0}, groups(scored=0), "no reward scored any of its completions"),
    ({"grad_norm": 0.0}, groups(scored=0, broken=64), "all 64 trajectories broke"),
    ({"sampling/off_policy_masked_ratio": 1.0, "grad_norm": 0.0}, groups(), "all its tokens are masked by"),
    ({"clip_ratio/region_mean": 1.0, "grad_norm": 0.0}, groups(), "all its tokens are clipped"),
    ({"completions/trained_ratio": 0.0}, groups(), "none of its completions has a gradient"),
    (
        {"completions/trained_ratio": 0.0, "completions/clipped_ratio": 1.0},
        groups(),
        "all its completions hit the token",
    ),
    ({"grad_norm": 0.0}, groups(), "its gradient is 0"),
    ({"grad_norm": 0.0, "rollout/stale_dropped": 7.0}, None, "7 of its groups were dropped because they were older"),
    ({"grad_norm": 0.0, "rollout/dropped_groups": 3.0}, None, "3 of its groups were dropped because fewer than two"),
]


@pytest.mark.parametrize(("changed", "of_groups", "text"), NOTHING)
def test_a_step_that_learned_nothing(changed, of_groups, text):
    found = explain_step(HEALTHY | changed, of_groups, 12, max_reward=1.0)
    assert found.level == "warning"
    assert found.text.startswith(f"Step 12 learned nothing: {text}")


def test_a_learning_rate_of_0_is_explained_by_the_warmup_of_the_critic_only_within_it():
    steps = [
        explain_step(HEALTHY | {"learning_rate": 0.0}, groups(), step, critic_warmup_steps=3).text for step in (3, 4)
    ]
    assert steps == [
        "Step 3 learned nothing: only the critic is trained in the first 3 steps (critic.warmup_steps)",
        "Step 4 learned nothing: its learning rate is 0",
    ]


# Changed metrics, groups, and what the sentence says.
LITTLE = ("learned little", "learned without")
SOMETHING = [
    ({}, groups(), "learned from 12 of 16 groups, those with different rewards; the gradient norm is 0.5"),
    ({}, None, "learned from 75% of the groups, those with different rewards; the gradient norm is 0.5"),
    ({"frac_reward_zero_std": 0.0}, groups(), "learned from all its groups; the gradient norm is 0.5"),
    ({"frac_reward_zero_std": 0.875}, groups(), "learned little: only 2 of 16 groups have different rewards"),
    (
        {"frac_reward_zero_std": 1.0},
        groups(),
        "learned without differences of rewards within groups",
    ),  # KL, or a critic
    ({"rollout/stale_dropped": 7.0}, groups(), "learned from 12 of 16 groups"),
    ({"clip_ratio/region_mean": 1.0}, groups(), "learned from 12 of 16 groups"),
]


@pytest.mark.parametrize(("changed", "of_groups", "text"), SOMETHING)
def test_a_step_that_learned(changed, of_groups, text):
    found = explain_step(HEALTHY | changed, of_groups, 12)
    assert found.level == ("info" if text.startswith(LITTLE) else "good")
    assert found.text.startswith(f"Step 12 {text}")


def test_steps_of_which_little_is_known():
    assert explain_step({}, None, 3) is None
    assert explain_step({}, groups(num_equal=16, high=0.0), 3).text.startswith(
        "Step 3 learned nothing: every completion in all 16 groups"
    )
    assert explain_step({}, groups(), 3).text == "Step 3 learned from 12 of 16 groups, those with different rewards"
    unknown = explain_step({"step_time": 1.0}, None, 3)
    assert (unknown.level, "nothing is known" in unknown.text) == ("info", True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.4123, "0.412"),
        (2e-6, "2e\u22126"),
        (7.77e-5, "7.77e\u22125"),
        (-0.5, "\u22120.5"),
        (12345.6, "12,346"),
        (1234567.0, "1.23M"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_written_as_beside_the_curves(value, text):
    assert number_text(value) == text
